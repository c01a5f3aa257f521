//! Compares the parts of `api/openapi.yaml` that are written by hand with the code: endpoints, examples and bounds.

use std::collections::BTreeSet;

use serde::de::DeserializeOwned;
use serde_json::Value;
use vm_api::migration::MigrationProgress;

use crate::api::info::{PciDeviceInfo, VmCounters, VmInfo, VmmPingResponse};
use crate::api::{ROUTES, Refusal, Request};
use crate::config::{PlannedVm, VmConfig};

type Set = BTreeSet<String>;

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

#[test]
fn each_reference_is_to_a_part_of_the_document() {
    fn check(document: &Value, value: &Value) -> usize {
        match value {
            Value::Object(fields) => {
                let target = fields.get("$ref").and_then(Value::as_str);
                let target = target.map(|target| target.strip_prefix('#').unwrap());
                target.inspect(|target| assert!(document.pointer(target).is_some(), "{target}"));
                usize::from(target.is_some()) + fields.values().map(|field| check(document, field)).sum::<usize>()
            }
            Value::Array(elements) => elements.iter().map(|element| check(document, element)).sum(),
            _ => 0,
        }
    }
    let document = document();
    assert!(check(&document, &document) > 300);
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

#[test]
fn each_state_of_a_migration_is_described() {
    use crate::migration::handover::Outcome;
    let outcomes =
        [Outcome::Finished, Outcome::Failed, Outcome::Cancelled, Outcome::GuestOff, Outcome::Unknown, Outcome::Forced];
    let states: Set = outcomes.into_iter().map(|outcome| outcome.name().to_string()).chain(["active".into()]).collect();
    assert_eq!(words(&schema(&document(), "MigrationState")["enum"]), states);
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
