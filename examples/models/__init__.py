"""A small zoo of plain Flax models, shared by the tests (tiny) and the benchmark (real size)."""

from .alexnet import AlexNet
from .cnn_linen import DigitsCNN as LinenDigitsCNN
from .cnn_nnx import DigitsCNN as NNXDigitsCNN
from .custom import SoftplusMLP
from .inception import Inception
from .mlp import init_mlp, mlp
from .nin import NiN
from .rematted import RematCNN
from .resnet import ResNet18
from .scanned import ScannedMLP
from .transformer import Transformer
from .unet import UNet
from .vgg import VGG16


__all__ = [
    "VGG16",
    "AlexNet",
    "Inception",
    "LinenDigitsCNN",
    "NNXDigitsCNN",
    "NiN",
    "RematCNN",
    "ResNet18",
    "ScannedMLP",
    "SoftplusMLP",
    "Transformer",
    "UNet",
    "init_mlp",
    "mlp",
]
