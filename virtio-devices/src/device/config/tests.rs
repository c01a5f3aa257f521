//! Comparison of fields, and the format of their values.

use super::*;

const FIELDS: &[ConfigField] = &[
    ConfigField::new("mac", 0, 6, Rule::Saved),
    ConfigField::new("size", 6, 2, Rule::Grows).of(3),
    ConfigField::new("tag", 8, 12, Rule::Same),
];

fn config(size: u16, tag: &[u8]) -> Vec<u8> {
    let mut config = [&[2, 0, 0, 0, 0, 9][..], &size.to_le_bytes(), tag].concat();
    config.resize(length(FIELDS), 0);
    config
}

fn refusal(then: &[u8], now: &[u8]) -> String {
    compare(FIELDS, then, now, None).unwrap_err().to_string()
}

#[test]
fn a_refusal_names_field_then_and_now() {
    let own = config(7, b"share");
    let mut mac = own.clone();
    mac[5] = 0x1a;
    for (then, what) in [
        (mac, "mac 02:00:00:00:00:1a, but the device here has 02:00:00:00:00:09"),
        (config(0x108, b"share"), "size 264, but the device here has 7"),
        (config(7, b"other"), "tag other, but the device here has share"),
        (config(7, b"\n"), "tag 0a:00:00:00:00:00:00:00:00:00:00:00, but the device here has share"),
    ] {
        assert_eq!(refusal(&then, &own), format!("its driver has read {what}; configure it as it was"));
    }
}

#[test]
fn fields_of_other_features_and_later_versions_are_not_compared() {
    let own = config(7, b"share");
    assert!(compare(FIELDS, &config(6, b"share"), &own, Some(1 << 3)).unwrap());
    assert!(!compare(FIELDS, &config(6, b"share"), &own, Some(0)).unwrap());
    assert!(!compare(FIELDS, &config(8, b"share"), &own, Some(0)).unwrap());
    // A state of a version that had one field less.
    assert!(!compare(FIELDS, &own[..8], &config(7, b"new"), None).unwrap());
    assert_eq!(refusal(&[0; 21], &own), "saved state of a device with different lengths of device configuration");
}
