"""Kinds of runs in a study. A new kind is a file with a class, and a line in KINDS."""

from parbank.study.kinds.base import Kind
from parbank.study.kinds.inside import Inside
from parbank.study.kinds.kernels import Kernels
from parbank.study.kinds.stored import Packing, Scoring
from parbank.study.kinds.training import Training

KINDS: dict[str, type[Kind]] = {kind.name: kind for kind in (Training, Inside, Packing, Scoring, Kernels)}
