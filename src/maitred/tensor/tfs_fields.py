"""The messages of TF Serving's gRPC APIs and of its two configuration files, once: their fields and their numbers.

Source: tensorflow_serving/apis, tensorflow_serving/config and session_bundle_config.proto of tensorflow/serving, with
what they take of tensorflow/core. On the wire a message has no package, so that all of them stand in one. In the tables
of files a mark says what is done with a field, as in config_fields.
"""

from __future__ import annotations

from collections.abc import Mapping
from math import prod

import numpy as np

from maitred.core.errors import InvalidRequest
from maitred.core.tensor_request import Tensor
from maitred.tensor.arrays import MOST_DIMS, array_of, data_type_of, numbers_as_bytes, texts_as_bytes
from maitred.tensor.config import ANY_MESSAGE
from maitred.tensor.instance import NUMPY_TYPES
from maitred.tensor.schema import message_classes, read_schema

PACKAGE = "tensorflow.serving"

TABLE = """
message ModelSpec
  1 string name
  2 Int64Value version @version_choice
  4 string version_label @version_choice
  3 string signature_name
message PredictRequest
  1 ModelSpec model_spec
  2 {string:TensorProto} inputs
  3 string* output_filter
message PredictResponse
  2 ModelSpec model_spec
  1 {string:TensorProto} outputs
message SignatureDefMap
  1 {string:SignatureDef} signature_def
message GetModelMetadataRequest
  1 ModelSpec model_spec
  2 string* metadata_field
message GetModelMetadataResponse
  1 ModelSpec model_spec
  2 {string:Any} metadata
message GetModelStatusRequest
  1 ModelSpec model_spec
message ModelVersionStatus
  1 int64 version
  2 ModelVersionStatus.State state
  3 StatusProto status
enum ModelVersionStatus.State
  0 UNKNOWN
  10 START
  20 LOADING
  30 AVAILABLE
  40 UNLOADING
  50 END
message GetModelStatusResponse
  1 ModelVersionStatus* model_version_status
message StatusProto
  1 Code error_code
  2 string error_message
message TensorProto
  1 DataType dtype
  2 TensorShapeProto tensor_shape
  3 int32 version_number
  4 bytes tensor_content
  13 int32* half_val
  5 float* float_val
  6 double* double_val
  7 int32* int_val
  8 bytes* string_val
  9 float* scomplex_val
  10 int64* int64_val
  11 bool* bool_val
  12 double* dcomplex_val
  16 uint32* uint32_val
  17 uint64* uint64_val
message TensorShapeProto
  2 TensorShapeProto.Dim* dim
  3 bool unknown_rank
message TensorShapeProto.Dim
  1 int64 size
  2 string name
enum DataType
  0 DT_INVALID
  1 DT_FLOAT
  2 DT_DOUBLE
  3 DT_INT32
  4 DT_UINT8
  5 DT_INT16
  6 DT_INT8
  7 DT_STRING
  8 DT_COMPLEX64
  9 DT_INT64
  10 DT_BOOL
  11 DT_QINT8
  12 DT_QUINT8
  13 DT_QINT32
  14 DT_BFLOAT16
  15 DT_QINT16
  16 DT_QUINT16
  17 DT_UINT16
  18 DT_COMPLEX128
  19 DT_HALF
  20 DT_RESOURCE
  21 DT_VARIANT
  22 DT_UINT32
  23 DT_UINT64
message TensorInfo
  1 string name
  2 DataType dtype
  3 TensorShapeProto tensor_shape
message SignatureDef
  1 {string:TensorInfo} inputs
  2 {string:TensorInfo} outputs
  3 string method_name
enum Code
  0 OK
  1 CANCELLED
  2 UNKNOWN
  3 INVALID_ARGUMENT
  4 DEADLINE_EXCEEDED
  5 NOT_FOUND
  6 ALREADY_EXISTS
  7 PERMISSION_DENIED
  8 RESOURCE_EXHAUSTED
  9 FAILED_PRECONDITION
  10 ABORTED
  11 OUT_OF_RANGE
  12 UNIMPLEMENTED
  13 INTERNAL
  14 UNAVAILABLE
  15 DATA_LOSS
  16 UNAUTHENTICATED
message Int64Value
  1 int64 value
message Any
  1 string type_url
  2 bytes value
"""

FILES = """
message ModelServerConfig
  = 1 ModelConfigList model_config_list @config
  ! 2 Any custom_model_config @config -- a source of models that is code
message ModelConfigList
  = 1 ModelConfig* config
message ModelConfig
  = 1 string name
  = 2 string base_path
  ! 3 ModelType model_type -- models are ONNX; leave it out
  = 4 string model_platform
  = 7 ServableVersionPolicy model_version_policy
  = 8 {string:int64} version_labels
  ! 6 LoggingConfig logging_config -- requests are traced and told in the log, not sampled into files
enum ModelType
  0 MODEL_TYPE_UNSPECIFIED
  1 TENSORFLOW
  2 OTHER
message ServableVersionPolicy
  = 100 ServableVersionPolicy.Latest latest @policy_choice
  = 101 ServableVersionPolicy.All all @policy_choice
  = 102 ServableVersionPolicy.Specific specific @policy_choice
message ServableVersionPolicy.Latest
  = 1 uint32 num_versions
message ServableVersionPolicy.All
message ServableVersionPolicy.Specific
  = 1 int64* versions
message LoggingConfig
  ! 1 LoggingConfig.LogCollectorConfig log_collector_config
  ! 2 LoggingConfig.SamplingConfig sampling_config
  ! 3 Any custom_logging_config
message LoggingConfig.LogCollectorConfig
  ! 1 string type
  ! 2 string filename_prefix
message LoggingConfig.SamplingConfig
  ! 1 double sampling_rate
message Any
  ! 1 string type_url
  ! 2 bytes value
message BatchingParameters
  = 1 Int64Value max_batch_size
  = 2 Int64Value batch_timeout_micros
  = 3 Int64Value max_enqueued_batches
  = 4 Int64Value num_batch_threads
  ~ 5 StringValue thread_pool_name -- threads are named by model and instance
  ! 8 BoolValue enable_large_batch_splitting -- a request's rows stand in one batch
  ! 9 Int64Value max_execution_batch_size -- a request's rows stand in one batch
  = 6 int64* allowed_batch_sizes
  ! 7 bool pad_variable_length_inputs -- unlike lengths share a batch by the parameter length_buckets of a model
message Int64Value
  = 1 int64 value
message StringValue
  ~ 1 string value
message BoolValue
  = 1 bool value
"""

MESSAGES = message_classes(read_schema(PACKAGE, TABLE))
FILE_SCHEMA = read_schema(f"{PACKAGE}.files", FILES)
FILE_MESSAGES = message_classes(FILE_SCHEMA)


# ---- TensorProtos as tensors, and back


TYPES: Mapping[str, tuple[int, str]] = {  # by datatype: the number of DataType, and the field that holds values
    "FP32": (1, "float_val"),
    "FP64": (2, "double_val"),
    "INT32": (3, "int_val"),
    "UINT8": (4, "int_val"),
    "INT16": (5, "int_val"),
    "INT8": (6, "int_val"),
    "BYTES": (7, "string_val"),
    "INT64": (9, "int64_val"),
    "BOOL": (10, "bool_val"),
    "BF16": (14, "half_val"),
    "UINT16": (17, "int_val"),
    "FP16": (19, "half_val"),
    "UINT32": (22, "uint32_val"),
    "UINT64": (23, "uint64_val"),
}
MOST_REPEATED = 1 << 20  # a value may stand for so many: few bytes must not take much memory
_DATATYPES = {number: datatype for datatype, (number, _) in TYPES.items()}


def tensor_from_proto(name: str, proto: ANY_MESSAGE) -> Tensor:
    """Raises InvalidRequest for a type that no model here has, and where shape and values do not go together."""
    datatype = _DATATYPES.get(proto.dtype)
    if datatype is None:
        raise InvalidRequest(f"input {name!r} has the dtype {proto.dtype}, which no model here takes")
    shape = tuple(dim.size for dim in proto.tensor_shape.dim)
    if proto.tensor_shape.unknown_rank or len(shape) > MOST_DIMS or any(size < 0 for size in shape):
        raise InvalidRequest(f"input {name!r} must have a shape, of sizes of 0 or more")
    if proto.tensor_content and datatype != "BYTES":
        return Tensor(name, datatype, shape, proto.tensor_content)
    return Tensor(name, datatype, shape, _values(name, proto, datatype, prod(shape)))


def _values(name: str, proto: ANY_MESSAGE, datatype: str, count: int) -> bytes:
    values = getattr(proto, TYPES[datatype][1])
    if len(values) == 1 < count <= MOST_REPEATED:
        values = list(values) * count  # one value stands for all
    if len(values) != count:
        raise InvalidRequest(f"input {name!r} has {len(values)} values, and its shape needs {count}")
    if datatype == "BYTES":
        return texts_as_bytes(values)
    kind = np.dtype(np.uint16) if datatype == "FP16" else NUMPY_TYPES[data_type_of(datatype)]  # half_val has bits
    try:
        return numbers_as_bytes(values, kind)
    except OverflowError:
        raise InvalidRequest(f"input {name!r} has a value that is no {datatype}") from None


def tensor_to_proto(tensor: Tensor) -> ANY_MESSAGE:
    """Numbers as their bytes, which is the shorter of the two forms."""
    proto = MESSAGES["TensorProto"](dtype=TYPES[tensor.datatype][0])
    for size in tensor.shape:
        proto.tensor_shape.dim.add(size=size)
    if tensor.datatype == "BYTES":
        proto.string_val.extend(array_of(tensor).reshape(-1).tolist())
    else:
        proto.tensor_content = bytes(tensor.data)
    return proto
