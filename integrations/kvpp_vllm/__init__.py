"""KVPP for released vLLM, as an out-of-tree plugin.

`plugin.register` is the entry point of the group `vllm.general_plugins`. It watches configurations being
made; one that asks for KVPP is checked (`checks`) and given the worker class of `worker`, in which
everything else happens, on seams that `seams` lists and checks. The rest of vLLM is untouched.
"""
