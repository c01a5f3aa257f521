//! Clients of Cloud Hypervisor: their requests are sent byte for byte, and each reply is parsed as they do it.
//! docs/clients.md has their versions, and notes about each.

mod folder;
mod generated;
mod kata_go;
mod kata_runtime_rs;
mod libvirt;
mod microvm_nix;

use serde_json::Value;

/// Fields that are sent at their defaults and not printed, as Cloud Hypervisor prints them only in special builds.
const NOT_PRINTED: [&str; 2] = ["tdx", "sev_snp"];

/// Asserts that `printed` has every key of `sent` with the same value, at any depth, except that null or an empty list
/// need not be printed.
fn assert_kept(sent: &Value, printed: &Value, at: &str) {
    match (sent, printed) {
        (Value::Null, _) => {}
        (Value::Array(sent), Value::Null) if sent.is_empty() => {}
        (Value::Object(sent), Value::Object(_)) => {
            for (key, value) in sent.iter().filter(|(key, _)| !NOT_PRINTED.contains(&key.as_str())) {
                assert_kept(value, &printed[key], &format!("{at}.{key}"));
            }
        }
        (Value::Array(sent), Value::Array(printed)) => {
            assert_eq!(sent.len(), printed.len(), "{at}");
            for (index, (sent, printed)) in sent.iter().zip(printed).enumerate() {
                assert_kept(sent, printed, &format!("{at}[{index}]"));
            }
        }
        (sent, printed) => assert_eq!(sent, printed, "{at}"),
    }
}

/// The slot in the address of an added device, as both of Kata's clients parse it. They accept no other form.
fn slot_of(bdf: &str) -> u8 {
    let slot = bdf.strip_prefix("0000:00:").and_then(|rest| rest.strip_suffix(".0"));
    let slot = slot.filter(|slot| slot.len() == 2).unwrap_or_else(|| panic!("{bdf} is no address for Kata"));
    u8::from_str_radix(slot, 16).unwrap()
}
