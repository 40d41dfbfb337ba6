"""Our stand-ins for the classes of foreign pickles, by name. A name never causes an import.

``DEFAULT`` lists the classes that occur in the files of torch, DeepSpeed, Megatron and their
dependencies. Each value is a function of ours that checks the types of its arguments and returns
plain data, never more than it was given.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, NoReturn, TypeAlias

from ucp_core.errors import ForeignClassError
from ucp_core.torch_files.pickle_arrays import NumpyArray
from ucp_core.torch_files.pickle_tensors import (
    STORAGES,
    TORCH_DTYPES,
    Storage,
    rebuild_from_type,
    rebuild_parameter,
    rebuild_tensor,
    rebuild_tensor_v3,
)

Allow: TypeAlias = "frozenset[str] | Mapping[str, Callable[..., Any]]"

#: Limit for the elements of a tuple used as a key, including nested ones. Hashing follows nested
#: tuples; a tuple that contains another twice at each of 64 levels would be hashed forever.
_KEY_ELEMENTS_MAX = 64
_NAME_CHARACTERS_MAX = 500


@dataclass(frozen=True, slots=True)
class Global:
    """A name in a pickle: of a class, a function or a dtype."""

    name: str  #: The name with its module.
    #: Returns the result of calling it.
    make: Callable[..., Any] = field(repr=False, compare=False)


@dataclass(slots=True, eq=False)
class Opaque:
    """An object of an allowed foreign class: what its pickle says, nothing else."""

    name: str  #: Name of the class, with its module.
    args: tuple[Any, ...] = ()  #: Arguments of the call that made it.
    state: Any = None  #: Its state, usually a dict of its attributes.


class Array:
    """A numpy array whose content follows later."""

    def with_state(self, state: Any) -> Any:
        """Return the array: ``(version, shape, dtype, is_fortran, bytes)``."""
        _, shape, dtype, is_fortran, data = state
        return array_of(data, dtype, shape, "F" if is_fortran else "C")


class Resolver:
    """Looks up the stand-ins of names."""

    def __init__(self, allow: Allow, where: str) -> None:
        self._allow = allow
        self._where = where
        self._known: dict[tuple[str, str], Global] = {}

    def find(self, module: str, name: str) -> Global:
        """Return the stand-in of a name; raise ``ForeignClassError`` if it is unknown."""
        try:
            return self._known[module, name]
        except KeyError:
            pass
        full = f"{_RENAMED.get(module, module)}.{name}"
        if len(full) > _NAME_CHARACTERS_MAX:
            msg = "the name of a class is too long"
            raise ValueError(msg)
        known = self._known[module, name] = Global(full, self._maker(full))
        return known

    def _maker(self, full: str) -> Callable[..., Any]:
        if not isinstance(self._allow, frozenset):
            if full in self._allow:
                return self._allow[full]
        elif _is_named(full, self._allow):
            return _opaque(full)
        maker = DEFAULT.get(full)
        if maker is not None:
            return maker
        if _is_named(full, _OPAQUE):
            return _opaque(full)
        if full in _REFUSED:

            def refuse(*_: Any) -> NoReturn:
                raise ForeignClassError(
                    f"{self._where}: {_REFUSED[full]} ({full}) cannot be read: save it as an "
                    "ordinary dense tensor",
                    path=self._where,
                    name=full,
                )

            return refuse
        raise ForeignClassError(
            f"{self._where}: the pickle in it needs the class {full}, which is not a known part of "
            "a checkpoint; nothing was executed. If you trust the file, load it with torch, and "
            "save it again without that object",
            path=self._where,
            name=full,
        )


def _is_named(full: str, names: frozenset[str]) -> bool:
    if full in names:
        return True
    parts = full.split(".")
    return any(".".join(parts[:size]) + "." in names for size in range(1, len(parts)))


def _opaque(full: str) -> Callable[..., Any]:
    def make(*args: Any) -> Opaque:
        return Opaque(full, args)

    return make


def check_key(key: Any) -> None:
    """Check that hashing ``key`` is cheap: a scalar, a stand-in, or a small tuple of them."""
    kind = type(key)
    if kind in _KEYS:
        return
    parts = [key]
    count = 0
    while parts:
        part = parts.pop()
        if type(part) is tuple:
            count += 1 + len(part)
            if count > _KEY_ELEMENTS_MAX:
                break
            parts += part
        elif type(part) not in _KEYS:
            count = _KEY_ELEMENTS_MAX + 1
            break
    if kind is not tuple or count > _KEY_ELEMENTS_MAX:
        msg = f"a {kind.__name__} is used as a key"
        raise TypeError(msg)


_KEYS = frozenset((str, int, float, bool, bytes, complex, type(None), Global, Opaque))


def expect(value: Any, *kinds: type[Any]) -> Any:
    """Return the value; raise ``TypeError`` if its class is none of these."""
    if type(value) not in kinds:
        msg = f"a {type(value).__name__} where {kinds[0].__name__} is expected"
        raise TypeError(msg)
    return value


def _size(extents: Any = ()) -> tuple[Any, ...]:
    return extents if type(extents) is tuple else tuple(expect(extents, tuple, list))


def _dict(items: Any = ()) -> dict[Any, Any]:
    if type(items) is dict:
        return dict(items)
    made: dict[Any, Any] = {}
    for item in expect(items, list, tuple):
        key, value = item
        check_key(key)
        made[key] = value
    return made


def _set(items: Any = ()) -> set[Any]:
    for item in expect(items, list, tuple, set, frozenset):
        check_key(item)
    return set(items)


def _bytes(data: Any = b"", encoding: Any = None) -> bytes:
    if encoding is not None:
        return _encode(data, encoding)
    return bytes(expect(data, bytes, bytearray))


def _encode(text: Any, encoding: Any = "utf-8") -> bytes:
    # Pickles of protocol 2 keep bytes as text of this encoding.
    if expect(encoding, str) not in {"latin1", "latin-1", "utf-8", "ascii"}:
        msg = f"encoding {encoding[:20]!r}"
        raise ValueError(msg)
    return bytes(expect(text, str), encoding)


def _numpy_reconstruct(kind: Any, shape: Any, code: Any) -> Array:
    del shape, code
    if expect(kind, Global).name != "numpy.ndarray":
        msg = f"an array of class {kind.name}"
        raise TypeError(msg)
    return Array()


def array_of(data: Any, dtype: Any, shape: Any, order: Any) -> NumpyArray:
    """Return the numpy array that a pickle describes; numbers and booleans only."""
    if type(dtype) is not Opaque or dtype.name != "numpy.dtype":
        msg = "an array without a dtype"
        raise TypeError(msg)
    return NumpyArray(
        shape=tuple(expect(extent, int) for extent in expect(shape, tuple)),
        data=_encode(data, "latin1") if type(data) is str else expect(data, bytes, bytearray),
        dtype=expect(dtype.args[0], str),
        byte_order=expect(dtype.state[1], str) if type(dtype.state) is tuple else "|",
        is_fortran=order == "F",
    )


def _plain(*args: Any) -> NoReturn:
    msg = f"a constant is called with {len(args)} arguments"
    raise TypeError(msg)


#: Modules under the names that older or newer pickles use for them.
_RENAMED = {
    "__builtin__": "builtins",
    "copy_reg": "copyreg",
    "numpy._core.multiarray": "numpy.core.multiarray",
    "numpy._core.numeric": "numpy.core.numeric",
    "pathlib._local": "pathlib",
}

_CONSTANTS = (
    "strided",
    "sparse_coo",
    "contiguous_format",
    "channels_last",
    "preserve_format",
    "per_tensor_affine",
    "per_channel_affine",
    "per_channel_affine_float_qparams",
)

_REFUSED = {
    "torch._utils._rebuild_qtensor": "a quantised tensor",
    "torch._utils._rebuild_sparse_tensor": "a sparse tensor",
    "torch._utils._rebuild_sparse_csr_tensor": "a sparse tensor",
    "torch._utils._rebuild_nested_tensor": "a nested tensor",
    "torch._utils._rebuild_meta_tensor_no_storage": "a tensor on the meta device, without data",
    "torch._utils._rebuild_wrapper_subclass": "a tensor subclass without data of its own",
    "torch._utils._rebuild_xla_tensor": "a tensor of an XLA device",
    "torch._utils._rebuild_device_tensor_from_numpy": "a tensor of a device outside torch",
    "torch._utils._rebuild_device_tensor_from_cpu_tensor": "a tensor of a device outside torch",
    "torch.jit._pickle.restore_type_tag": "a TorchScript value",
}

_DCP = "torch.distributed.checkpoint"
#: Classes whose data is kept as ``Opaque``. A trailing dot means everything below.
_OPAQUE = frozenset(
    (
        "argparse.Namespace",
        "builtins.Ellipsis",
        "builtins.slice",
        "builtins.xrange",
        "fractions.Fraction",
        "types.SimpleNamespace",
        "_io.BytesIO",
        "datetime.date",
        "datetime.datetime",
        "datetime.time",
        "datetime.timedelta",
        "datetime.timezone",
        "decimal.Decimal",
        "numpy.random.",
        "signal.Signals",
        "uuid.UUID",
        "torch._C._nn.",
        "torch.nn.functional.",
        "torch.device",
        "torch.Generator",
        "deepspeed.runtime.fp16.loss_scaler.LossScaler",
        "deepspeed.runtime.fp16.loss_scaler.DynamicLossScaler",
        "deepspeed.runtime.fp16.loss_scaler.LossScaleConfig",
        "deepspeed.runtime.zero.config.ZeroStageEnum",
        "deepspeed.utils.tensor_fragment.fragment_address",
        "deepspeed.runtime.zero.stage_1_and_2.fragment_address",
        "deepspeed.checkpoint.universal_checkpoint.SubparamShape",
        "deepspeed.utils.tensor_fragment.tensor_fragment",
        f"{_DCP}.metadata.",
        f"{_DCP}.planner.",
        f"{_DCP}.filesystem._StorageInfo",
        f"{_DCP}.filesystem._StoragePrefix",
        f"{_DCP}.filesystem._FileSystemWriterMetadata",
        f"{_DCP}._hf_utils._HFStorageInfo",
        "torch.distributed._shard.sharded_tensor.metadata.",
        "torch.distributed._shard.metadata.ShardMetadata",
        "megatron.",
    )
)

DEFAULT: dict[str, Callable[..., Any]] = {
    "builtins.set": _set,
    "builtins.frozenset": lambda items=(): frozenset(_set(items)),
    "builtins.list": lambda items=(): list(expect(items, list, tuple)),
    "builtins.tuple": _size,
    "builtins.dict": _dict,
    "builtins.int": lambda value=0: int(expect(value, int, bool)),
    # Names that protocol 2, which torch writes, uses for int and str.
    "builtins.long": lambda value=0: int(expect(value, int, bool)),
    "builtins.unicode": _plain,
    "builtins.float": lambda value=0.0: float(expect(value, float, int)),
    "builtins.complex": lambda *parts: complex(*(expect(part, float, int) for part in parts)),
    "builtins.bytes": _bytes,
    "builtins.bytearray": _bytes,
    "builtins.object": _plain,
    "builtins.str": _plain,
    "builtins.bool": _plain,
    # For members of an enumeration and nested classes: only joins the names.
    "builtins.getattr": lambda owner, name: Opaque(
        f"{expect(owner, Global).name}.{expect(name, str)}"
    ),
    "copyreg._reconstructor": lambda kind, _base, _state: expect(kind, Global).make(),
    "copyreg.__newobj__": lambda kind, *args: expect(kind, Global).make(*args),
    "collections.OrderedDict": _dict,
    "collections.defaultdict": lambda _factory=None, items=(): _dict(items),
    "collections.Counter": _dict,
    "collections.deque": lambda items=(), _length=None: list(expect(items, list, tuple)),
    "_codecs.encode": _encode,
    **{
        f"pathlib.{name}": lambda *parts: "/".join(expect(p, str) for p in parts).replace("//", "/")
        for name in ("PosixPath", "WindowsPath", "PurePosixPath")
    },
    "numpy.ndarray": _plain,
    "numpy.dtype": _opaque("numpy.dtype"),
    "numpy.core.multiarray._reconstruct": _numpy_reconstruct,
    "numpy.core.multiarray.scalar": lambda dtype, data=None: array_of(
        data, dtype, (), "C"
    ).tolist(),
    "numpy.core.numeric._frombuffer": array_of,
    "torch.Size": _size,
    "torch.Tensor": _plain,
    "torch.nn.parameter.Parameter": _plain,
    "torch.nn.parameter.Buffer": _plain,
    "torch.serialization._get_layout": lambda name: Opaque(expect(name, str)),
    "torch._utils._rebuild_tensor": rebuild_tensor,
    "torch._utils._rebuild_tensor_v2": rebuild_tensor,
    "torch._utils._rebuild_tensor_v3": rebuild_tensor_v3,
    "torch._utils._rebuild_parameter": rebuild_parameter,
    "torch._utils._rebuild_parameter_with_state": rebuild_parameter,
    "torch._tensor._rebuild_from_type": rebuild_from_type,
    "torch._tensor._rebuild_from_type_v2": rebuild_from_type,
    "torch.storage.UntypedStorage": Storage(None),
    "torch.storage.TypedStorage": Storage(None),
    **{f"torch.{name}": _plain for name in (*TORCH_DTYPES, *_CONSTANTS)},
    **{f"torch.{name}Storage": Storage(dtype) for name, dtype in STORAGES.items()},
    **{f"torch.cuda.{name}Storage": Storage(dtype) for name, dtype in STORAGES.items()},
}
