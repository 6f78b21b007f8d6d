"""Configuration of models and training, the process environment, and recipes. Standard library only."""

from __future__ import annotations

from fastmp.config.attention import AttentionSpec as AttentionSpec
from fastmp.config.attention import LatentConfig as LatentConfig
from fastmp.config.attention import Projection as Projection
from fastmp.config.dispatchers import DISPATCHERS as DISPATCHERS
from fastmp.config.dispatchers import DispatcherSpec as DispatcherSpec
from fastmp.config.environment import Environment as Environment
from fastmp.config.environment import set_default_variables as set_default_variables
from fastmp.config.environment import with_variables as with_variables
from fastmp.config.model import EXCHANGE_OPTIONS as EXCHANGE_OPTIONS
from fastmp.config.model import MAX_LAYERS as MAX_LAYERS
from fastmp.config.model import BertConfig as BertConfig
from fastmp.config.model import GPTConfig as GPTConfig
from fastmp.config.model import MoEConfig as MoEConfig
from fastmp.config.rope_scaling import RopeScaling as RopeScaling
from fastmp.config.specs import ACTIVATIONS as ACTIVATIONS
from fastmp.config.specs import NORMS as NORMS
from fastmp.config.specs import OPTIMIZERS as OPTIMIZERS
from fastmp.config.specs import ActivationSpec as ActivationSpec
from fastmp.config.specs import NormSpec as NormSpec
from fastmp.config.specs import OptimizerSpec as OptimizerSpec
from fastmp.config.specs import StateSpec as StateSpec
from fastmp.config.training import SINKS as SINKS
from fastmp.config.training import CheckpointConfig as CheckpointConfig
from fastmp.config.training import DataConfig as DataConfig
from fastmp.config.training import GraphConfig as GraphConfig
from fastmp.config.training import MaskedLMConfig as MaskedLMConfig
from fastmp.config.training import OptimizerConfig as OptimizerConfig
from fastmp.config.training import ParallelConfig as ParallelConfig
from fastmp.config.training import Recipe as Recipe
from fastmp.config.training import TrainConfig as TrainConfig
