"""Makes descriptors.json: Core ML's model, feature-type and MIL messages as coremltools' protobuf descriptors have them.

A test compares this crate's schema with it, field by field. The file holds
    messages: {full name: {"fields": [{name, number, type, label, type_name?, oneof?, packed?, map?}], "oneofs": [names]}}
    enums:    {full name: {value name: number}}
for every message and enum of Model.proto, FeatureTypes.proto, Parameters.proto, DataStructures.proto and MIL.proto, map entries left out: a
map field says {"key": type, "value": type, "value_type_name"?: full name} itself. `type` is the .proto file's own word (string, bool, int64,
double, message, enum, …) and `label` is "optional" or "repeated" (proto3 has no other).

    pip install coremltools==9.0
    python proto/tests/make_descriptors.py
"""

import json
import logging
from pathlib import Path

logging.disable(logging.WARNING)
from coremltools.proto import DataStructures_pb2, FeatureTypes_pb2, MIL_pb2, Model_pb2, Parameters_pb2  # noqa: E402
from google.protobuf.descriptor_pb2 import FieldDescriptorProto, FileDescriptorProto  # noqa: E402

FILES = [Model_pb2, FeatureTypes_pb2, Parameters_pb2, DataStructures_pb2, MIL_pb2]


def type_word(code):
    return FieldDescriptorProto.Type.Name(code).removeprefix("TYPE_").lower()


def field_entry(field, entries, oneofs):
    entry = {
        "name": field.name,
        "number": field.number,
        "type": type_word(field.type),
        "label": FieldDescriptorProto.Label.Name(field.label).removeprefix("LABEL_").lower(),
    }
    if field.type_name:
        entry["type_name"] = field.type_name.lstrip(".")
    if field.HasField("oneof_index"):
        entry["oneof"] = oneofs[field.oneof_index].name
    if field.options.HasField("packed"):
        entry["packed"] = field.options.packed
    if entry.get("type_name") in entries:
        key, value = entries[entry["type_name"]].field
        entry["map"] = {"key": type_word(key.type), "value": type_word(value.type)}
        if value.type_name:
            entry["map"]["value_type_name"] = value.type_name.lstrip(".")
        del entry["type_name"]
    return entry


def collect(scope, message, messages, enums):
    name = f"{scope}.{message.name}"
    entries = {f"{name}.{inner.name}": inner for inner in message.nested_type if inner.options.map_entry}
    messages[name] = {
        "fields": [
            field_entry(field, entries, message.oneof_decl)
            for field in sorted(message.field, key=lambda field: field.number)
        ],
        "oneofs": [oneof.name for oneof in message.oneof_decl],
    }
    for enum in message.enum_type:
        enums[f"{name}.{enum.name}"] = {value.name: value.number for value in enum.value}
    for inner in message.nested_type:
        if not inner.options.map_entry:
            collect(name, inner, messages, enums)


def main():
    messages, enums = {}, {}
    for module in FILES:
        file = FileDescriptorProto()
        module.DESCRIPTOR.CopyToProto(file)
        assert file.syntax == "proto3", file.name
        for message in file.message_type:
            collect(file.package, message, messages, enums)
        for enum in file.enum_type:
            enums[f"{file.package}.{enum.name}"] = {value.name: value.number for value in enum.value}
    result = {"messages": dict(sorted(messages.items())), "enums": dict(sorted(enums.items()))}
    text = json.dumps(result, indent=1, ensure_ascii=False)
    Path(__file__).with_name("descriptors.json").write_text(text + "\n")
    print(f"{len(messages)} messages, {len(enums)} enums")


if __name__ == "__main__":
    main()
