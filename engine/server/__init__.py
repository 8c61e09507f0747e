"""The gRPC face of the engine: draftloom.v1 in, `engine.requests` out, and back.

serve.py         one listening server: services, health, reflection, limits, draining
services.py      one short method per RPC
wire.py          protobuf <-> dataclasses, the only place that knows both
interceptors.py  around every call: decoding, errors, tenant
errors.py        the one table from engine errors to gRPC status codes
"""
