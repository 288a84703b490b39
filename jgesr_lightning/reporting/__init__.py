"""From run folders to figures, tables and a report; knows files and numbers, nothing of how a run is made."""
