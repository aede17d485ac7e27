"""Other methods that change the weights of the layers that stay: LaCo merges, LLM-Pruner narrows."""

from utils.baselines.laco import Laco
from utils.baselines.llm_pruner import LLMPruner

BASELINES = {"laco": Laco, "llm-pruner": LLMPruner}
