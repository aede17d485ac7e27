"""Shared machinery of the scripts: one module per job, no module imports a script."""
