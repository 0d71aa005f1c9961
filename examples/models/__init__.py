"""A small zoo of plain Flax models, shared by the tests (tiny) and the benchmark (real size)."""

from .alexnet import AlexNet
from .bert import Bert
from .cnn_linen import DigitsCNN as LinenDigitsCNN
from .cnn_nnx import DigitsCNN as NNXDigitsCNN
from .custom import SoftplusMLP
from .gpt2 import GPT2
from .group_norm import GroupNormCNN
from .hawk import Hawk
from .inception import Inception
from .llama import Llama
from .mixer import Mixer
from .mlp import init_mlp, mlp
from .nin import NiN
from .overfeat import OverFeat
from .rematted import RematCNN
from .resnet import ResNet18, ResNet50
from .scanned import ScannedMLP
from .transformer import Transformer
from .unet import UNet
from .vgg import VGG16
from .vit import ViT


__all__ = [
    "GPT2",
    "VGG16",
    "AlexNet",
    "Bert",
    "GroupNormCNN",
    "Hawk",
    "Inception",
    "LinenDigitsCNN",
    "Llama",
    "Mixer",
    "NNXDigitsCNN",
    "NiN",
    "OverFeat",
    "RematCNN",
    "ResNet18",
    "ResNet50",
    "ScannedMLP",
    "SoftplusMLP",
    "Transformer",
    "UNet",
    "ViT",
    "init_mlp",
    "mlp",
]
