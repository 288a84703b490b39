"""Processes, files and signals: what a run needs of the machine."""
