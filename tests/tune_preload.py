"""What the server of tune_fakes.py imports before it forks, so that its processes start at once."""

import optuna.storages.journal
import optuna.visualization
import sqlalchemy.dialects.sqlite
import tune_fakes
import tyro
from scipy import stats

__all__ = ["optuna", "sqlalchemy", "stats", "tune_fakes", "tyro"]
