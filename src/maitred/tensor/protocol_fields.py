"""The messages of KServe v2 over gRPC with Triton's extensions, once: their fields, their numbers, and the methods.

Source: protobuf/grpc_service.proto and health.proto of Triton Inference Server's repository `common`. A ModelConfig is
declared as its bytes, which is the same on the wire: its own table makes it.
"""

from __future__ import annotations

from maitred.tensor.schema import message_classes, read_schema

TABLE = """
message ServerLiveRequest
message ServerLiveResponse
  1 bool live
message ServerReadyRequest
message ServerReadyResponse
  1 bool ready
message ModelReadyRequest
  1 string name
  2 string version
message ModelReadyResponse
  1 bool ready
message ServerMetadataRequest
message ServerMetadataResponse
  1 string name
  2 string version
  3 string* extensions
message ModelMetadataRequest
  1 string name
  2 string version
message ModelMetadataResponse
  1 string name
  2 string* versions
  3 string platform
  4 ModelMetadataResponse.TensorMetadata* inputs
  5 ModelMetadataResponse.TensorMetadata* outputs
message ModelMetadataResponse.TensorMetadata
  1 string name
  2 string datatype
  3 int64* shape
message InferParameter
  1 bool bool_param @parameter_choice
  2 int64 int64_param @parameter_choice
  3 string string_param @parameter_choice
  4 double double_param @parameter_choice
  5 uint64 uint64_param @parameter_choice
message InferTensorContents
  1 bool* bool_contents
  2 int32* int_contents
  3 int64* int64_contents
  4 uint32* uint_contents
  5 uint64* uint64_contents
  6 float* fp32_contents
  7 double* fp64_contents
  8 bytes* bytes_contents
message ModelInferRequest
  1 string model_name
  2 string model_version
  3 string id
  4 {string:InferParameter} parameters
  5 ModelInferRequest.InferInputTensor* inputs
  6 ModelInferRequest.InferRequestedOutputTensor* outputs
  7 bytes* raw_input_contents
message ModelInferRequest.InferInputTensor
  1 string name
  2 string datatype
  3 int64* shape
  4 {string:InferParameter} parameters
  5 InferTensorContents contents
message ModelInferRequest.InferRequestedOutputTensor
  1 string name
  2 {string:InferParameter} parameters
message ModelInferResponse
  1 string model_name
  2 string model_version
  3 string id
  4 {string:InferParameter} parameters
  5 ModelInferResponse.InferOutputTensor* outputs
  6 bytes* raw_output_contents
message ModelInferResponse.InferOutputTensor
  1 string name
  2 string datatype
  3 int64* shape
  4 {string:InferParameter} parameters
  5 InferTensorContents contents
message ModelStreamInferResponse
  1 string error_message
  2 ModelInferResponse infer_response
message ModelConfigRequest
  1 string name
  2 string version
message ModelConfigResponse
  1 bytes config
message ModelStatisticsRequest
  1 string name
  2 string version
message StatisticDuration
  1 uint64 count
  2 uint64 ns
message InferStatistics
  1 StatisticDuration success
  2 StatisticDuration fail
  3 StatisticDuration queue
  4 StatisticDuration compute_input
  5 StatisticDuration compute_infer
  6 StatisticDuration compute_output
  7 StatisticDuration cache_hit
  8 StatisticDuration cache_miss
message InferResponseStatistics
  1 StatisticDuration compute_infer
  2 StatisticDuration compute_output
  3 StatisticDuration success
  4 StatisticDuration fail
  5 StatisticDuration empty_response
  6 StatisticDuration cancel
message InferBatchStatistics
  1 uint64 batch_size
  2 StatisticDuration compute_input
  3 StatisticDuration compute_infer
  4 StatisticDuration compute_output
message MemoryUsage
  1 string type
  2 int64 id
  3 uint64 byte_size
message ModelStatistics
  1 string name
  2 string version
  3 uint64 last_inference
  4 uint64 inference_count
  5 uint64 execution_count
  6 InferStatistics inference_stats
  7 InferBatchStatistics* batch_stats
  8 MemoryUsage* memory_usage
  9 {string:InferResponseStatistics} response_stats
message ModelStatisticsResponse
  1 ModelStatistics* model_stats
message ModelRepositoryParameter
  1 bool bool_param @parameter_choice
  2 int64 int64_param @parameter_choice
  3 string string_param @parameter_choice
  4 bytes bytes_param @parameter_choice
message RepositoryIndexRequest
  1 string repository_name
  2 bool ready
message RepositoryIndexResponse
  1 RepositoryIndexResponse.ModelIndex* models
message RepositoryIndexResponse.ModelIndex
  1 string name
  2 string version
  3 string state
  4 string reason
message RepositoryModelLoadRequest
  1 string repository_name
  2 string model_name
  3 {string:ModelRepositoryParameter} parameters
message RepositoryModelLoadResponse
message RepositoryModelUnloadRequest
  1 string repository_name
  2 string model_name
  3 {string:ModelRepositoryParameter} parameters
message RepositoryModelUnloadResponse
message SystemSharedMemoryStatusRequest
  1 string name
message SystemSharedMemoryStatusResponse
  1 {string:SystemSharedMemoryStatusResponse.RegionStatus} regions
message SystemSharedMemoryStatusResponse.RegionStatus
  1 string name
  2 string key
  3 uint64 offset
  4 uint64 byte_size
message SystemSharedMemoryRegisterRequest
  1 string name
  2 string key
  3 uint64 offset
  4 uint64 byte_size
message SystemSharedMemoryRegisterResponse
message SystemSharedMemoryUnregisterRequest
  1 string name
message SystemSharedMemoryUnregisterResponse
message CudaSharedMemoryStatusRequest
  1 string name
message CudaSharedMemoryStatusResponse
  1 {string:CudaSharedMemoryStatusResponse.RegionStatus} regions
message CudaSharedMemoryStatusResponse.RegionStatus
  1 string name
  2 uint64 device_id
  3 uint64 byte_size
message CudaSharedMemoryRegisterRequest
  1 string name
  2 bytes raw_handle
  3 int64 device_id
  4 uint64 byte_size
message CudaSharedMemoryRegisterResponse
message CudaSharedMemoryUnregisterRequest
  1 string name
message CudaSharedMemoryUnregisterResponse
message TraceSettingRequest
  1 {string:TraceSettingRequest.SettingValue} settings
  2 string model_name
message TraceSettingRequest.SettingValue
  1 string* value
message TraceSettingResponse
  1 {string:TraceSettingResponse.SettingValue} settings
message TraceSettingResponse.SettingValue
  1 string* value
message LogSettingsRequest
  1 {string:LogSettingsRequest.SettingValue} settings
message LogSettingsRequest.SettingValue
  1 bool bool_param @parameter_choice
  2 uint32 uint32_param @parameter_choice
  3 string string_param @parameter_choice
message LogSettingsResponse
  1 {string:LogSettingsResponse.SettingValue} settings
message LogSettingsResponse.SettingValue
  1 bool bool_param @parameter_choice
  2 uint32 uint32_param @parameter_choice
  3 string string_param @parameter_choice
"""

HEALTH_TABLE = """
message HealthCheckRequest
  1 string service
message HealthCheckResponse
  1 HealthCheckResponse.ServingStatus status
enum HealthCheckResponse.ServingStatus
  0 UNKNOWN
  1 SERVING
  2 NOT_SERVING
  3 SERVICE_UNKNOWN
"""

INFERENCE, HEALTH = "inference", "grpc.health.v1"
MESSAGES = message_classes(read_schema(INFERENCE, TABLE))
HEALTH_MESSAGES = message_classes(read_schema(HEALTH, HEALTH_TABLE))
SERVING, NOT_SERVING, SERVICE_UNKNOWN = 1, 2, 3  # of ServingStatus

RAW_INPUT_CONTENTS = 7  # of ModelInferRequest
RAW_OUTPUT_CONTENTS = 6  # of ModelInferResponse
