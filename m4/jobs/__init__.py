"""The jobs: thin callers of the libraries, which share only the files in MODEL_DIR.

docs/run_folder.md has the table of a run's files.
"""
