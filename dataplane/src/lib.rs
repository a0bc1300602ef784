//! LM endpoints on AF_XDP: UMEM, rings, landing zones, the poll engine.
