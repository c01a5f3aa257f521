//! Compares `api/openapi.yaml` with the code: each has all that the other has.

use std::collections::BTreeSet;
use std::fmt;

use serde::Deserialize;
use serde::de::{self, DeserializeOwned, Visitor};
use serde_json::Value;
use vm_api::migration::*;

use crate::api::info::*;
use crate::api::*;
use crate::config::unsupported::Object;
use crate::config::*;

/// The serde names of a struct's fields or of an enum's variants.
struct Names<'a>(&'a mut Vec<&'static str>);

#[derive(Debug)]
struct Seen;

impl fmt::Display for Seen {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("seen")
    }
}

impl std::error::Error for Seen {}

impl de::Error for Seen {
    fn custom<T: fmt::Display>(_: T) -> Self {
        Self
    }
}

impl<'de> de::Deserializer<'de> for Names<'_> {
    type Error = Seen;

    fn deserialize_any<V: Visitor<'de>>(self, _: V) -> Result<V::Value, Seen> {
        Err(Seen)
    }

    fn deserialize_struct<V: Visitor<'de>>(
        self,
        _: &'static str,
        fields: &'static [&'static str],
        _: V,
    ) -> Result<V::Value, Seen> {
        self.0.extend(fields);
        Err(Seen)
    }

    fn deserialize_enum<V: Visitor<'de>>(
        self,
        _: &'static str,
        variants: &'static [&'static str],
        _: V,
    ) -> Result<V::Value, Seen> {
        self.0.extend(variants);
        Err(Seen)
    }

    serde::forward_to_deserialize_any! {
        bool i8 i16 i32 i64 i128 u8 u16 u32 u64 u128 f32 f64 char str string bytes byte_buf option unit unit_struct
        newtype_struct seq tuple tuple_struct map identifier ignored_any
    }
}

type Set = BTreeSet<String>;

fn names<T: for<'de> Deserialize<'de>>() -> Set {
    let mut names = Vec::new();
    let _ = T::deserialize(Names(&mut names));
    assert!(!names.is_empty());
    names.into_iter().map(str::to_string).collect()
}

fn document() -> Value {
    serde_yaml_ng::from_str(include_str!("../../../api/openapi.yaml")).unwrap()
}

fn schema<'a>(document: &'a Value, name: &str) -> &'a Value {
    document["components"]["schemas"].get(name).unwrap_or_else(|| panic!("no schema {name}"))
}

fn keys(object: &Value) -> Set {
    object.as_object().into_iter().flatten().map(|(key, _)| key.clone()).collect()
}

fn words(array: &Value) -> Set {
    array.as_array().into_iter().flatten().map(|word| word.as_str().unwrap().to_string()).collect()
}

/// Asserts that schema `name` has the fields of `T` and those of `later`, and requires the fields that `T` requires.
fn assert_fields<T: DeserializeOwned>(document: &Value, name: &str, later: Option<Object>) {
    let schema = schema(document, name);
    let mut fields = names::<T>();
    // A second spelling: clients would have one field twice.
    fields.remove("generic-vhost-user");
    fields.extend(later.into_iter().flat_map(Object::fields).map(str::to_string));
    assert_eq!(keys(&schema["properties"]), fields, "{name}");
    let required = words(&schema["required"]);
    assert!(required.is_subset(&fields), "{name}");
    let is_empty_enough = serde_json::from_value::<T>(Value::Object(Default::default())).is_ok();
    // The command line may leave the payload out of its file, because it has options for it.
    let is_described = required.is_empty() || name == "VmConfig";
    assert_eq!(is_empty_enough, is_described, "what {name} requires");
    for field in fields {
        let is_nullable = schema["properties"][&field]["nullable"] == true;
        if is_nullable {
            // A missing required field is reported after all fields have been read.
            let mut value = serde_json::json!({&field: null});
            json::drop_nulls(&mut value);
            later.map_or(Ok(()), |object| object.strip(&mut value, "")).unwrap();
            let error = serde_json::from_value::<T>(value).err().map(|error| error.to_string()).unwrap_or_default();
            assert!(!error.contains("null"), "{name}.{field}: {error}");
        }
    }
}

fn assert_variants<T: DeserializeOwned>(document: &Value, name: &str) {
    assert_eq!(words(&schema(document, name)["enum"]), names::<T>(), "{name}");
}

#[test]
fn every_field_is_described_and_every_description_is_of_a_field() {
    let document = document();
    let all = &document;
    assert_fields::<VmConfig>(all, "VmConfig", Some(Object::Vm));
    assert_fields::<CpusConfig>(all, "CpusConfig", Some(Object::Cpus));
    assert_fields::<CpuTopology>(all, "CpuTopology", None);
    assert_fields::<CpuAffinity>(all, "CpuAffinity", None);
    assert_fields::<CpuFeatures>(all, "CpuFeatures", None);
    assert_variants::<CoreScheduling>(all, "CoreSchedulingMode");
    assert_fields::<MemoryConfig>(all, "MemoryConfig", Some(Object::Memory));
    assert_fields::<MemoryZoneConfig>(all, "MemoryZoneConfig", Some(Object::MemoryZone));
    assert_fields::<PayloadConfig>(all, "PayloadConfig", Some(Object::Payload));
    assert_fields::<NetConfig>(all, "NetConfig", None);
    assert_fields::<VfConfig>(all, "VfConfig", None);
    assert_fields::<RateLimiterConfig>(all, "RateLimiterConfig", None);
    assert_fields::<TokenBucketConfig>(all, "TokenBucket", None);
    assert_fields::<VirtQueueAffinity>(all, "VirtQueueAffinity", None);
    assert_fields::<DiskConfig>(all, "DiskConfig", Some(Object::Disk));
    assert_fields::<RngConfig>(all, "RngConfig", None);
    assert_fields::<RtcConfig>(all, "RtcConfig", None);
    assert_fields::<BalloonConfig>(all, "BalloonConfig", None);
    assert_fields::<VdpaConfig>(all, "VdpaConfig", None);
    assert_fields::<VsockConfig>(all, "VsockConfig", None);
    assert_fields::<FsConfig>(all, "FsConfig", None);
    assert_fields::<PmemConfig>(all, "PmemConfig", None);
    assert_fields::<DeviceConfig>(all, "DeviceConfig", Some(Object::Device));
    assert_fields::<TpmConfig>(all, "TpmConfig", None);
    assert_fields::<LandlockConfig>(all, "LandlockConfig", None);
    assert_fields::<GenericVhostUserConfig>(all, "GenericVhostUserConfig", None);
    assert_fields::<ConsoleConfig>(all, "ConsoleConfig", None);
    assert_fields::<ConsoleConfig>(all, "SerialConfig", None);
    assert_fields::<DebugConsoleConfig>(all, "DebugConsoleConfig", None);
    assert_fields::<PlatformConfig>(all, "PlatformConfig", Some(Object::Platform));
    assert_fields::<NumaConfig>(all, "NumaConfig", None);
    assert_fields::<NumaDistance>(all, "NumaDistance", None);
    assert_fields::<PciSegmentConfig>(all, "PciSegmentConfig", None);
    assert_fields::<RemoveDevice>(all, "VmRemoveDevice", None);
    assert_fields::<Resize>(all, "VmResize", None);
    assert_fields::<ResizeZone>(all, "VmResizeZone", None);
    assert_fields::<ResizeDisk>(all, "VmResizeDisk", None);
    assert_fields::<RateLimitGroupConfig>(all, "RateLimitGroupConfig", None);
    assert_fields::<SetVf>(all, "VmSetVf", None);
    assert_fields::<vm_api::body::SnapshotConfig>(all, "VmSnapshotConfig", None);
    assert_fields::<RestoreConfig>(all, "RestoreConfig", None);
    assert_fields::<RestoredNet>(all, "RestoredNetConfig", None);
    assert_fields::<RestoredBackend>(all, "RestoredBackendConfig", None);
    assert_variants::<MemoryRestoreMode>(all, "MemoryRestoreMode");
    assert_variants::<OnMissingBackend>(all, "OnMissingBackend");
    assert_variants::<NoLink>(all, "NoLink");
    assert_fields::<VmmPingResponse>(all, "VmmPingResponse", None);
    assert_fields::<VmInfo>(all, "VmInfo", None);
    assert_fields::<DeviceNode>(all, "DeviceNode", None);
    assert_fields::<NicInfo>(all, "NicInfo", None);
    assert_fields::<SriovInfo>(all, "SriovInfo", None);
    assert_fields::<VfInfo>(all, "VfInfo", None);
    assert_fields::<BackendInfo>(all, "BackendInfo", None);
    assert_fields::<PolicyInfo>(all, "PolicyInfo", None);
    assert_fields::<SwitchInfo>(all, "SwitchInfo", None);
    assert_fields::<RngConfig>(all, "RngConfig", None);
    assert_fields::<PciDeviceInfo>(all, "PciDeviceInfo", None);
    assert_fields::<SendMigration>(all, "SendMigrationData", None);
    assert_fields::<ReceiveMigration>(all, "ReceiveMigrationData", None);
    assert_fields::<ResumeOptions>(all, "VmResume", None);
    assert_fields::<MigrationProgress>(all, "MigrationProgress", None);
    assert_fields::<DowntimeParts>(all, "DowntimeParts", None);
    assert_variants::<MemoryMode>(all, "MemoryMode");
    assert_variants::<TimeoutStrategy>(all, "TimeoutStrategy");
    assert_variants::<MigrationRole>(all, "MigrationRole");
    assert_variants::<VmState>(all, "VmState");
    assert_variants::<VfState>(all, "VfState");
    assert_variants::<Link>(all, "Link");
    assert_variants::<LinkPolicy>(all, "LinkPolicy");
    assert_variants::<VlanProto>(all, "VlanProto");
    assert_variants::<SwitchMode>(all, "SwitchMode");
    assert_variants::<BackendKind>(all, "BackendKind");
    assert_variants::<BarType>(all, "BarType");
    assert_variants::<ConsoleMode>(all, "ConsoleMode");
    assert_variants::<VhostMode>(all, "VhostMode");
    assert_variants::<LockGranularity>(all, "LockGranularity");
    assert_variants::<ImageType>(all, "ImageType");
    assert_variants::<HotplugMethod>(all, "HotplugMethod");
    assert_variants::<LandlockAccess>(all, "LandlockAccess");
}

/// Generators for Go make constants of all enums in one package, which also has types such as `Client`.
#[test]
fn each_value_of_an_enum_has_a_name_of_its_own_in_clients() {
    let document = document();
    let schemas = document["components"]["schemas"].as_object().unwrap();
    let mut all = Set::new();
    for (schema, described) in schemas {
        for (field, property) in described["properties"].as_object().into_iter().flatten() {
            assert!(property["enum"].is_null(), "{schema}.{field}: give the enum a schema of its own");
        }
        let names = words(&described["x-enum-varnames"]);
        assert_eq!(names.len(), described["enum"].as_array().map_or(0, Vec::len), "{schema}");
        for name in names {
            assert!(name.starts_with(schema) && !schemas.contains_key(&name), "{name}");
            assert!(all.insert(name.clone()), "{name} is there twice");
        }
    }
    assert!(all.len() > 50, "{all:?}");
}

#[test]
fn no_schema_refuses_fields_that_ask_for_nothing() {
    fn refuses(value: &Value) -> bool {
        match value {
            Value::Object(fields) => {
                fields.get("additionalProperties") == Some(&false.into()) || fields.values().any(refuses)
            }
            Value::Array(elements) => elements.iter().any(refuses),
            _ => false,
        }
    }
    assert!(!refuses(&document()));
}

/// The operations: path, method and description.
fn operations(document: &Value) -> Vec<(String, String, &Value)> {
    let mut operations = Vec::new();
    for (path, item) in document["paths"].as_object().unwrap() {
        let server = item.get("servers").unwrap_or(&document["servers"])[0]["url"].as_str().unwrap();
        let root = server.strip_prefix("http://localhost").unwrap();
        for (method, operation) in item.as_object().unwrap().iter().filter(|(key, _)| *key != "servers") {
            operations.push((format!("{root}{path}"), method.to_uppercase(), operation));
        }
    }
    operations
}

#[test]
fn openapi_describes_exactly_the_served_endpoints() {
    let document = document();
    let described: BTreeSet<_> = operations(&document).into_iter().map(|(path, method, _)| (path, method)).collect();
    let served = ROUTES.iter().map(|route| (route.path.to_string(), route.method.to_string())).collect();
    assert_eq!(described, served);
}

#[test]
fn operations_have_names_of_their_own() {
    let document = document();
    let all = operations(&document);
    let ids: Set = all.iter().map(|(_, _, operation)| operation["operationId"].as_str().unwrap().to_string()).collect();
    assert_eq!(ids.len(), all.len());
    for id in [
        "shutdownVMM",
        "createVM",
        "deleteVM",
        "bootVM",
        "pauseVM",
        "resumeVM",
        "shutdownVM",
        "rebootVM",
        "powerButtonVM",
    ] {
        assert!(ids.contains(id), "{id}");
    }
}

#[test]
fn a_vm_requires_its_payload_alone() {
    let create =
        |body: &[u8]| Request { method: "PUT", path: "/api/v1/vm.create", body, fds: Vec::new() }.action().is_ok();
    assert_eq!(words(&schema(&document(), "VmConfig")["required"]), Set::from(["payload".to_string()]));
    assert!(create(br#"{"payload": {}}"#) && !create(b"{}"));
}

/// A VM with this field at `value`, in an object of schema `name`. Only rules for this field can refuse it.
fn vm_with(name: &str, field: &str, value: Value) -> Option<VmConfig> {
    let mut object = serde_json::json!({field: value});
    let mut vm = serde_json::json!({"cpus": {"boot_vcpus": 254}, "payload": {}, "platform": {"num_pci_segments": 2}});
    if field == "pci_device_id" {
        // Slot 0 of the first segment is the host bridge's.
        object["pci_segment"] = 1.into();
    }
    match name {
        "CpusConfig" => vm["cpus"] = serde_json::json!({"boot_vcpus": 1, "max_vcpus": 254, field: value}),
        "NetConfig" => vm["net"] = Value::Array(vec![object]),
        "VfConfig" => {
            let mut vf = serde_json::json!({"index": 0});
            vf[field] = value;
            vm["net"] = serde_json::json!([{"sriov_vfs": 32_512, "vfs": [vf]}]);
        }
        "DiskConfig" => {
            vm["disks"] = Value::Array(vec![object]);
            vm["disks"][0]["path"] = "/d".into();
        }
        "VdpaConfig" => {
            vm["vdpa"] = Value::Array(vec![object]);
            vm["vdpa"][0]["path"] = "/d".into();
        }
        "RngConfig" => vm["rng"] = object,
        _ => return None,
    }
    serde_json::from_value(vm).ok()
}

#[test]
fn a_bound_of_the_description_is_the_bound_of_the_plan() {
    let document = document();
    let mut bounds = 0;
    for (name, schema) in document["components"]["schemas"].as_object().unwrap() {
        for (field, described) in schema["properties"].as_object().into_iter().flatten() {
            let is_planned = |value: Value| vm_with(name, field, value).map(|vm| PlannedVm::new(vm).is_ok());
            let number = |bound: &str| described[bound].as_i64();
            let text =
                |bound: &str, more: i64| Some("x".repeat(usize::try_from(described[bound].as_i64()? + more).unwrap()));
            // Byte counts have no round bounds, and a socket needs further fields.
            if ![
                "num_queues",
                "queue_size",
                "mtu",
                "vlan",
                "pci_device_id",
                "boot_vcpus",
                "max_phys_bits",
                "sriov_vfs",
                "index",
                "id",
                "tap",
                "serial",
            ]
            .contains(&field.as_str())
                || vm_with(name, field, Value::Null).is_none()
            {
                continue;
            }
            let pairs = [
                (number("minimum").map(Value::from), number("minimum").map(|least| Value::from(least - 1))),
                (number("maximum").map(Value::from), number("maximum").map(|most| Value::from(most + 1))),
                (text("minLength", 0).map(Value::from), text("minLength", -1).map(Value::from)),
                (text("maxLength", 0).map(Value::from), text("maxLength", 1).map(Value::from)),
            ];
            for (within, beyond) in pairs.into_iter().filter_map(|(within, beyond)| Some((within?, beyond?))) {
                assert_eq!(is_planned(within.clone()), Some(true), "{name}.{field} = {within}");
                assert_ne!(is_planned(beyond.clone()), Some(true), "{name}.{field} = {beyond}");
                bounds += 1;
            }
        }
    }
    assert!(bounds > 30, "{bounds}");
}

#[test]
fn an_example_of_a_request_is_one() {
    for (path, method, operation) in operations(&document()) {
        let example = &operation["requestBody"]["content"]["application/json"]["example"];
        let body = if example.is_null() { String::new() } else { example.to_string() };
        let request = Request { method: &method, path: &path, body: body.as_bytes(), fds: Vec::new() };
        let is_later = operation["summary"].as_str().unwrap().ends_with("(not yet)");
        match request.action() {
            Ok(_) => assert!(!is_later, "{path}"),
            Err(Refusal::Failure(failure)) => assert!(is_later, "{path}: {failure:?}"),
            Err(refusal) => panic!("{path}: {refusal:?}"),
        }
    }
}

#[test]
fn an_example_of_an_answer_is_one() {
    fn check<T: DeserializeOwned>(example: &Value) -> Result<(), serde_json::Error> {
        serde_json::from_value::<T>(example.clone()).map(drop)
    }
    for (path, _, operation) in operations(&document()) {
        let content = &operation["responses"]["200"]["content"]["application/json"];
        let Some(schema) = content["schema"]["$ref"].as_str() else { continue };
        let example = &content["example"];
        let checked = match schema.rsplit('/').next().unwrap() {
            "VmmPingResponse" => check::<VmmPingResponse>(example),
            "VmInfo" => check::<VmInfo>(example),
            "VmCounters" => check::<VmCounters>(example),
            "PciDeviceInfo" => check::<PciDeviceInfo>(example),
            "MigrationProgress" => check::<MigrationProgress>(example),
            other => panic!("{path} answers {other}, which no test knows"),
        };
        checked.unwrap_or_else(|error| panic!("{path}: {error}"));
    }
}

#[test]
fn every_status_that_the_server_itself_gives_is_described() {
    for (path, _, operation) in operations(&document()) {
        let statuses = keys(&operation["responses"]);
        let has = |status: &str| statuses.contains(status);
        // Any endpoint may get invalid bytes, unexpected descriptors, and heads that are too large.
        assert!(has("400") && has("431"), "{path}");
        assert_eq!(has("429"), !operation["requestBody"].is_null(), "{path}");
        let is_later = operation["summary"].as_str().unwrap().ends_with("(not yet)");
        assert!(if is_later { !has("500") } else { has("500") && (has("200") || has("204")) }, "{path}");
        assert_eq!(has("501"), is_later, "{path}");
    }
}

#[test]
fn a_list_of_names_has_no_gap() {
    assert_eq!(names::<RemoveDevice>(), Set::from(["id".to_string()]));
    assert_eq!(names::<Link>(), Set::from(["up".to_string(), "down".to_string()]));
    assert!(names::<NetConfig>().contains("sriov_vfs"));
}
