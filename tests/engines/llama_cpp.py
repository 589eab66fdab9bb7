"""llama.cpp's server as a program: of the environment of the package xllamacpp, not of ours.

python llama_cpp.py GGUF PORT [KEY]
"""

import sys
import threading

import xllamacpp

params = xllamacpp.CommonParams()
params.model.path, params.port = sys.argv[1], int(sys.argv[2])
params.model_alias = {"smollm2"}
params.cpuparams.n_threads = params.cpuparams_batch.n_threads = 1
params.n_ctx, params.n_parallel = 8192, 2
params.endpoint_metrics = True
params.use_jinja = True
if len(sys.argv) > 3:
    params.api_keys = sys.argv[3:]
server = xllamacpp.Server(params)
threading.Event().wait()
