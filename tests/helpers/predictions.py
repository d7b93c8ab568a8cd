"""Predictions of one process, to compare others with."""

from typing import Any

import numpy as np
import torch

from cdc_plugin.evaluation.predict import Prediction, prepare
from cdc_plugin.evaluation.records import concatenate_tables
from cdc_plugin.models.clusterer import Clusterer


def predict_at_once(model: Clusterer, data: Any, batch_size: int = 256) -> Prediction:
    predictor = prepare(model, data, torch.device("cpu"), batch_size)
    return predictor.collect(list(predictor.predict_parts([range(len(predictor.stream))])))


def table_of(found: Prediction) -> np.recarray:
    return concatenate_tables(found.tables())
