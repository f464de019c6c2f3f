from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from typing import ClassVar as _ClassVar, Optional as _Optional

DESCRIPTOR: _descriptor.FileDescriptor

class DeleteNetDevReq(_message.Message):
    __slots__ = ("name",)
    NAME_FIELD_NUMBER: _ClassVar[int]
    name: str
    def __init__(self, name: _Optional[str] = ...) -> None: ...

class DeleteNetDevResp(_message.Message):
    __slots__ = ("ret",)
    RET_FIELD_NUMBER: _ClassVar[int]
    ret: int
    def __init__(self, ret: _Optional[int] = ...) -> None: ...
