"""The Optuna study: search space, baselines, constraint, stop, resume.

Only here is optuna imported. Knows the worker through the `Measurer` protocol alone.
"""
