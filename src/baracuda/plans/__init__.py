"""Plans: descriptors, the declarations of the named plans, and the checks in front of a launch."""
