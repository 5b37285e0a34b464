"""KernelSpec -> source -> NVRTC -> cubin -> disk cache -> launch; tensor maps. Alone in knowing NVRTC and the driver.

`compile` needs neither a GPU nor libcuda, and gives what ptxas says about the kernel beside the cubin. `load` makes it
a `Kernel` of one device; `Kernel.launch` puts it on the current stream, never waits, and can be captured in a graph.
"""

from __future__ import annotations

from tilewise.arch import ARCHS as ARCHS
from tilewise.arch import LIMITS as LIMITS
from tilewise.arch import arch_of as arch_of
from tilewise.arch import occupancy as occupancy
from tilewise.compiler.diagnostics import KernelCompileError as KernelCompileError
from tilewise.compiler.diagnostics import ResourceReport as ResourceReport
from tilewise.compiler.driver import capture_of as capture_of
from tilewise.compiler.driver import driver_available as driver_available
from tilewise.compiler.launch import Args as Args
from tilewise.compiler.launch import Kernel as Kernel
from tilewise.compiler.launch import load as load
from tilewise.compiler.launch import raw_stream as raw_stream
from tilewise.compiler.nvrtc import Binary as Binary
from tilewise.compiler.nvrtc import compile as compile
from tilewise.compiler.nvrtc import include_folders as include_folders
from tilewise.compiler.resources import ResourceRow as ResourceRow
from tilewise.compiler.resources import resource_rows as resource_rows
from tilewise.compiler.resources import resource_table as resource_table
from tilewise.compiler.spec import KernelSpec as KernelSpec
from tilewise.compiler.tensor_maps import TensorMap as TensorMap
from tilewise.compiler.tensor_maps import TensorMapSpec as TensorMapSpec
from tilewise.compiler.tensor_maps import encode as encode
from tilewise.compiler.tensor_maps import tensor_map as tensor_map
