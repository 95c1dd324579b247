"""Options of a process group of HCCL; the group itself is the test device's."""


class ProcessGroupHCCL:
    class Options:
        def __init__(self) -> None:
            self.hccl_config: dict[str, object] = {}
            self.is_high_priority_stream = False
            self.global_ranks_in_group: tuple[int, ...] = ()
            self.group_id = ""
            self._timeout = None
