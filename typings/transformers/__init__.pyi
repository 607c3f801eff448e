"""The names of transformers that rlctl imports, for pyright: a name that is new in rlctl is added here.

The `__init__` of the package names everything of 400 models, which takes pyright 30 s to read.
"""

from transformers.cache_utils import DynamicCache as DynamicCache
from transformers.configuration_utils import PreTrainedConfig as PreTrainedConfig
from transformers.configuration_utils import PretrainedConfig as PretrainedConfig
from transformers.generation.configuration_utils import GenerationConfig as GenerationConfig
from transformers.generation.stopping_criteria import StoppingCriteria as StoppingCriteria
from transformers.generation.stopping_criteria import StoppingCriteriaList as StoppingCriteriaList
from transformers.modeling_utils import AttentionInterface as AttentionInterface
from transformers.modeling_utils import PreTrainedModel as PreTrainedModel
from transformers.models.auto.configuration_auto import CONFIG_MAPPING as CONFIG_MAPPING
from transformers.models.auto.configuration_auto import AutoConfig as AutoConfig
from transformers.models.auto.modeling_auto import AutoModel as AutoModel
from transformers.models.auto.modeling_auto import AutoModelForCausalLM as AutoModelForCausalLM
from transformers.models.auto.modeling_auto import AutoModelForImageTextToText as AutoModelForImageTextToText
from transformers.models.auto.modeling_auto import AutoModelForSequenceClassification as AutoModelForSequenceClassification
from transformers.models.auto.tokenization_auto import AutoTokenizer as AutoTokenizer
from transformers.models.llama.configuration_llama import LlamaConfig as LlamaConfig
from transformers.models.llama.modeling_llama import LlamaForCausalLM as LlamaForCausalLM
from transformers.models.qwen2.configuration_qwen2 import Qwen2Config as Qwen2Config
from transformers.models.qwen2.modeling_qwen2 import Qwen2ForCausalLM as Qwen2ForCausalLM
from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import Qwen2VLImageProcessorPil as Qwen2VLImageProcessorPil
from transformers.models.qwen3.configuration_qwen3 import Qwen3Config as Qwen3Config
from transformers.models.qwen3.modeling_qwen3 import Qwen3ForCausalLM as Qwen3ForCausalLM
from transformers.models.qwen3_moe.configuration_qwen3_moe import Qwen3MoeConfig as Qwen3MoeConfig
from transformers.models.qwen3_vl.configuration_qwen3_vl import Qwen3VLConfig as Qwen3VLConfig
from transformers.models.qwen3_vl.modeling_qwen3_vl import Qwen3VLForConditionalGeneration as Qwen3VLForConditionalGeneration
from transformers.tokenization_utils_base import PreTrainedTokenizerBase as PreTrainedTokenizerBase
from transformers.tokenization_utils_tokenizers import PreTrainedTokenizerFast as PreTrainedTokenizerFast
from transformers.trainer_callback import TrainerCallback as TrainerCallback
from transformers.utils.quantization_config import BitsAndBytesConfig as BitsAndBytesConfig

__version__: str
