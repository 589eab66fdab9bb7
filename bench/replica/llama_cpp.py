"""llama.cpp's server over OpenAI's API, from the package xllamacpp: a program of that package's environment, not of ours.

python llama_cpp.py GGUF PORT THREADS TOKENS
"""

import sys
import threading

import xllamacpp

params = xllamacpp.CommonParams()
params.model.path, params.port = sys.argv[1], int(sys.argv[2])
params.cpuparams.n_threads = params.cpuparams_batch.n_threads = int(sys.argv[3])
params.n_ctx = int(sys.argv[4])
server = xllamacpp.Server(params)
threading.Event().wait()
