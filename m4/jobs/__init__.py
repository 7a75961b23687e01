"""The jobs: each a thin caller of the libraries, speaking to the others through MODEL_DIR only.

docs/run_folder.md has the table of a run's files.
"""
