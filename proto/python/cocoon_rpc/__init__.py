"""What both ends of every RPC share: errors, interceptors, tokens.

Hand-written and guest-safe: the standard library, grpcio, protobuf and
googleapis-common-protos only. Generated messages live beside it in `cocoon`.
"""
