"""Outgrowing one machine: the same application as replicas on Ray Serve, behind one front.

`front` takes requests in and passes them on, `affinity` knows which replica has computed the beginning of one, `router`
tells Ray Serve, `replica` is what runs in each of its processes, `fleet` starts and ends all of it. Ray is an extra:
nothing here imports it before `fleet` needs it.
"""
