"""What watches a federation: each is told of the rounds through Fabric's hooks, and all but the first only observe."""
