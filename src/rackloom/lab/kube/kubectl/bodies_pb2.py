"""Generated protocol buffer code."""


from google.protobuf import descriptor as _descriptor
from google.protobuf import descriptor_pool as _descriptor_pool
from google.protobuf import runtime_version as _runtime_version
from google.protobuf import symbol_database as _symbol_database
from google.protobuf.internal import builder as _builder


_runtime_version.ValidateProtobufRuntimeVersion(
    _runtime_version.Domain.PUBLIC,
    7,
    35,
    1,
    '',
    'rackloom/twin/kube/protobuf/bodies.proto'
)
# @@protoc_insertion_point(imports)

_sym_db = _symbol_database.Default()




DESCRIPTOR = _descriptor_pool.Default().AddSerializedFile(b'\n(rackloom/twin/kube/protobuf/bodies.proto\x12\x1brackloom.twin.kube.protobuf\",\n\x08TypeMeta\x12\x12\n\napiVersion\x18\x01 \x01(\t\x12\x0c\n\x04kind\x18\x02 \x01(\t\"}\n\x07Unknown\x12\x37\n\x08typeMeta\x18\x01 \x01(\x0b\x32%.rackloom.twin.kube.protobuf.TypeMeta\x12\x0b\n\x03raw\x18\x02 \x01(\x0c\x12\x17\n\x0f\x63ontentEncoding\x18\x03 \x01(\t\x12\x13\n\x0b\x63ontentType\x18\x04 \x01(\t\"\xad\x01\n\x0eOwnerReference\x12\x0c\n\x04kind\x18\x01 \x01(\t\x12\x0c\n\x04name\x18\x03 \x01(\t\x12\x0b\n\x03uid\x18\x04 \x01(\t\x12\x12\n\napiVersion\x18\x05 \x01(\t\x12\x17\n\ncontroller\x18\x06 \x01(\x08H\x00\x88\x01\x01\x12\x1f\n\x12\x62lockOwnerDeletion\x18\x07 \x01(\x08H\x01\x88\x01\x01\x42\r\n\x0b_controllerB\x15\n\x13_blockOwnerDeletion\"\xad\x03\n\nObjectMeta\x12\x0c\n\x04name\x18\x01 \x01(\t\x12\x14\n\x0cgenerateName\x18\x02 \x01(\t\x12\x11\n\tnamespace\x18\x03 \x01(\t\x12\x17\n\x0fresourceVersion\x18\x06 \x01(\t\x12\x43\n\x06labels\x18\x0b \x03(\x0b\x32\x33.rackloom.twin.kube.protobuf.ObjectMeta.LabelsEntry\x12M\n\x0b\x61nnotations\x18\x0c \x03(\x0b\x32\x38.rackloom.twin.kube.protobuf.ObjectMeta.AnnotationsEntry\x12\x44\n\x0fownerReferences\x18\r \x03(\x0b\x32+.rackloom.twin.kube.protobuf.OwnerReference\x12\x12\n\nfinalizers\x18\x0e \x03(\t\x1a-\n\x0bLabelsEntry\x12\x0b\n\x03key\x18\x01 \x01(\t\x12\r\n\x05value\x18\x02 \x01(\t:\x02\x38\x01\x1a\x32\n\x10\x41nnotationsEntry\x12\x0b\n\x03key\x18\x01 \x01(\t\x12\r\n\x05value\x18\x02 \x01(\t:\x02\x38\x01\"[\n\rPreconditions\x12\x10\n\x03uid\x18\x01 \x01(\tH\x00\x88\x01\x01\x12\x1c\n\x0fresourceVersion\x18\x02 \x01(\tH\x01\x88\x01\x01\x42\x06\n\x04_uidB\x12\n\x10_resourceVersion\"\xd0\x01\n\rDeleteOptions\x12\x1f\n\x12gracePeriodSeconds\x18\x01 \x01(\x05H\x00\x88\x01\x01\x12\x41\n\rpreconditions\x18\x02 \x01(\x0b\x32*.rackloom.twin.kube.protobuf.Preconditions\x12\x1e\n\x11propagationPolicy\x18\x04 \x01(\tH\x01\x88\x01\x01\x12\x0e\n\x06\x64ryRun\x18\x05 \x03(\tB\x15\n\x13_gracePeriodSecondsB\x14\n\x12_propagationPolicy\"\x88\x01\n\x08\x45viction\x12\x39\n\x08metadata\x18\x01 \x01(\x0b\x32\'.rackloom.twin.kube.protobuf.ObjectMeta\x12\x41\n\rdeleteOptions\x18\x02 \x01(\x0b\x32*.rackloom.twin.kube.protobuf.DeleteOptions\"#\n\rNamespaceSpec\x12\x12\n\nfinalizers\x18\x01 \x03(\t\"\x80\x01\n\tNamespace\x12\x39\n\x08metadata\x18\x01 \x01(\x0b\x32\'.rackloom.twin.kube.protobuf.ObjectMeta\x12\x38\n\x04spec\x18\x02 \x01(\x0b\x32*.rackloom.twin.kube.protobuf.NamespaceSpec\"\xd8\x02\n\tConfigMap\x12\x39\n\x08metadata\x18\x01 \x01(\x0b\x32\'.rackloom.twin.kube.protobuf.ObjectMeta\x12>\n\x04\x64\x61ta\x18\x02 \x03(\x0b\x32\x30.rackloom.twin.kube.protobuf.ConfigMap.DataEntry\x12J\n\nbinaryData\x18\x03 \x03(\x0b\x32\x36.rackloom.twin.kube.protobuf.ConfigMap.BinaryDataEntry\x12\x16\n\timmutable\x18\x04 \x01(\x08H\x00\x88\x01\x01\x1a+\n\tDataEntry\x12\x0b\n\x03key\x18\x01 \x01(\t\x12\r\n\x05value\x18\x02 \x01(\t:\x02\x38\x01\x1a\x31\n\x0f\x42inaryDataEntry\x12\x0b\n\x03key\x18\x01 \x01(\t\x12\r\n\x05value\x18\x02 \x01(\x0c:\x02\x38\x01\x42\x0c\n\n_immutable\"\xdd\x02\n\x06Secret\x12\x39\n\x08metadata\x18\x01 \x01(\x0b\x32\'.rackloom.twin.kube.protobuf.ObjectMeta\x12;\n\x04\x64\x61ta\x18\x02 \x03(\x0b\x32-.rackloom.twin.kube.protobuf.Secret.DataEntry\x12\x0c\n\x04type\x18\x03 \x01(\t\x12G\n\nstringData\x18\x04 \x03(\x0b\x32\x33.rackloom.twin.kube.protobuf.Secret.StringDataEntry\x12\x16\n\timmutable\x18\x05 \x01(\x08H\x00\x88\x01\x01\x1a+\n\tDataEntry\x12\x0b\n\x03key\x18\x01 \x01(\t\x12\r\n\x05value\x18\x02 \x01(\x0c:\x02\x38\x01\x1a\x31\n\x0fStringDataEntry\x12\x0b\n\x03key\x18\x01 \x01(\t\x12\r\n\x05value\x18\x02 \x01(\t:\x02\x38\x01\x42\x0c\n\n_immutable\"\x8d\x01\n\x0fObjectReference\x12\x0c\n\x04kind\x18\x01 \x01(\t\x12\x11\n\tnamespace\x18\x02 \x01(\t\x12\x0c\n\x04name\x18\x03 \x01(\t\x12\x0b\n\x03uid\x18\x04 \x01(\t\x12\x12\n\napiVersion\x18\x05 \x01(\t\x12\x17\n\x0fresourceVersion\x18\x06 \x01(\t\x12\x11\n\tfieldPath\x18\x07 \x01(\t\"$\n\x14LocalObjectReference\x12\x0c\n\x04name\x18\x01 \x01(\t\"\xa3\x02\n\x0eServiceAccount\x12\x39\n\x08metadata\x18\x01 \x01(\x0b\x32\'.rackloom.twin.kube.protobuf.ObjectMeta\x12=\n\x07secrets\x18\x02 \x03(\x0b\x32,.rackloom.twin.kube.protobuf.ObjectReference\x12K\n\x10imagePullSecrets\x18\x03 \x03(\x0b\x32\x31.rackloom.twin.kube.protobuf.LocalObjectReference\x12)\n\x1c\x61utomountServiceAccountToken\x18\x04 \x01(\x08H\x00\x88\x01\x01\x42\x1f\n\x1d_automountServiceAccountTokenb\x06proto3')

_globals = globals()
_builder.BuildMessageAndEnumDescriptors(DESCRIPTOR, _globals)
_builder.BuildTopDescriptorsAndMessages(DESCRIPTOR, 'rackloom.twin.kube.protobuf.bodies_pb2', _globals)
if not _descriptor._USE_C_DESCRIPTORS:
  DESCRIPTOR._loaded_options = None
  _globals['_OBJECTMETA_LABELSENTRY']._loaded_options = None
  _globals['_OBJECTMETA_LABELSENTRY']._serialized_options = b'8\001'
  _globals['_OBJECTMETA_ANNOTATIONSENTRY']._loaded_options = None
  _globals['_OBJECTMETA_ANNOTATIONSENTRY']._serialized_options = b'8\001'
  _globals['_CONFIGMAP_DATAENTRY']._loaded_options = None
  _globals['_CONFIGMAP_DATAENTRY']._serialized_options = b'8\001'
  _globals['_CONFIGMAP_BINARYDATAENTRY']._loaded_options = None
  _globals['_CONFIGMAP_BINARYDATAENTRY']._serialized_options = b'8\001'
  _globals['_SECRET_DATAENTRY']._loaded_options = None
  _globals['_SECRET_DATAENTRY']._serialized_options = b'8\001'
  _globals['_SECRET_STRINGDATAENTRY']._loaded_options = None
  _globals['_SECRET_STRINGDATAENTRY']._serialized_options = b'8\001'
  _globals['_TYPEMETA']._serialized_start=73
  _globals['_TYPEMETA']._serialized_end=117
  _globals['_UNKNOWN']._serialized_start=119
  _globals['_UNKNOWN']._serialized_end=244
  _globals['_OWNERREFERENCE']._serialized_start=247
  _globals['_OWNERREFERENCE']._serialized_end=420
  _globals['_OBJECTMETA']._serialized_start=423
  _globals['_OBJECTMETA']._serialized_end=852
  _globals['_OBJECTMETA_LABELSENTRY']._serialized_start=755
  _globals['_OBJECTMETA_LABELSENTRY']._serialized_end=800
  _globals['_OBJECTMETA_ANNOTATIONSENTRY']._serialized_start=802
  _globals['_OBJECTMETA_ANNOTATIONSENTRY']._serialized_end=852
  _globals['_PRECONDITIONS']._serialized_start=854
  _globals['_PRECONDITIONS']._serialized_end=945
  _globals['_DELETEOPTIONS']._serialized_start=948
  _globals['_DELETEOPTIONS']._serialized_end=1156
  _globals['_EVICTION']._serialized_start=1159
  _globals['_EVICTION']._serialized_end=1295
  _globals['_NAMESPACESPEC']._serialized_start=1297
  _globals['_NAMESPACESPEC']._serialized_end=1332
  _globals['_NAMESPACE']._serialized_start=1335
  _globals['_NAMESPACE']._serialized_end=1463
  _globals['_CONFIGMAP']._serialized_start=1466
  _globals['_CONFIGMAP']._serialized_end=1810
  _globals['_CONFIGMAP_DATAENTRY']._serialized_start=1702
  _globals['_CONFIGMAP_DATAENTRY']._serialized_end=1745
  _globals['_CONFIGMAP_BINARYDATAENTRY']._serialized_start=1747
  _globals['_CONFIGMAP_BINARYDATAENTRY']._serialized_end=1796
  _globals['_SECRET']._serialized_start=1813
  _globals['_SECRET']._serialized_end=2162
  _globals['_SECRET_DATAENTRY']._serialized_start=2054
  _globals['_SECRET_DATAENTRY']._serialized_end=2097
  _globals['_SECRET_STRINGDATAENTRY']._serialized_start=2099
  _globals['_SECRET_STRINGDATAENTRY']._serialized_end=2148
  _globals['_OBJECTREFERENCE']._serialized_start=2165
  _globals['_OBJECTREFERENCE']._serialized_end=2306
  _globals['_LOCALOBJECTREFERENCE']._serialized_start=2308
  _globals['_LOCALOBJECTREFERENCE']._serialized_end=2344
  _globals['_SERVICEACCOUNT']._serialized_start=2347
  _globals['_SERVICEACCOUNT']._serialized_end=2638
# @@protoc_insertion_point(module_scope)
