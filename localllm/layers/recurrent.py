"""The bodies that keep a state of each sequence in place of keys and values.

Each has `layer`, its number among those with states; `linears`, the matrices in its recipe's formats, the first and the
last of which are in front and behind; and `exact_linears`, those that are read in fp32, the first of which reads what
the block does.
"""

from __future__ import annotations

from localllm.layers.delta_net import DeltaNet
from localllm.layers.mamba import Mamba
from localllm.layers.mamba2 import Mamba2
from localllm.layers.rwkv7 import Rwkv7ChannelMix, Rwkv7TimeMix
from localllm.layers.short_conv import ShortConv

Recurrent = DeltaNet | Mamba | Mamba2 | ShortConv | Rwkv7TimeMix | Rwkv7ChannelMix
