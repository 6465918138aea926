"""Offline batch jobs: file formats, the job, and its journal."""
