"""The engine's operations on a GPU. Nothing is built here yet: everything runs on the CPU."""
