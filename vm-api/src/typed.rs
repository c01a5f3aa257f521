//! From a JSON tree to a type. A field that the type lacks is ignored if its value requests nothing, as newer clients
//! send fields that this version does not know; with any other value it is refused by name.

use serde::Deserializer;
use serde::de::value::{MapDeserializer, SeqDeserializer};
use serde::de::{DeserializeOwned, Error as _, IntoDeserializer, Unexpected, Visitor};
use serde::forward_to_deserialize_any;
use serde_json::Value;

use crate::similar::similar;

/// Converts a tree to a type, whose objects must be JSON objects.
///
/// # Errors
///
/// Fails with the invalid value, and its path. [`serde_json`] alone would also accept an array with an object's fields
/// in order, which no client intends.
pub fn typed<T: DeserializeOwned>(value: Value) -> Result<T, serde_path_to_error::Error<serde_json::Error>> {
    serde_path_to_error::deserialize(Tree(value))
}

/// True if a field with this value has a JSON default: null, false, 0 or empty.
fn asks_for_nothing(value: &Value) -> bool {
    match value {
        Value::Null => true,
        Value::Bool(value) => !value,
        Value::Number(number) => number.as_f64() == Some(0.0),
        Value::String(text) => text.is_empty(),
        Value::Array(elements) => elements.is_empty(),
        Value::Object(fields) => fields.is_empty(),
    }
}

/// An error with words of JSON in place of Rust's types.
fn plain(error: serde_json::Error) -> serde_json::Error {
    let line = error.to_string();
    let Some((said, expected)) = line.rsplit_once(", expected ") else { return error };
    if let Some(meant) = said.strip_prefix("unknown field `").and_then(|name| meant(name, expected)) {
        return serde_json::Error::custom(format!("{said}; did you mean `{meant}`?"));
    }
    let expected = match expected {
        "u8" => "a whole number from 0 to 255",
        "u16" => "a whole number from 0 to 65535",
        "u32" => "a whole number from 0 to 4294967295",
        "u64" | "usize" => "a whole number from 0",
        "i32" | "i64" => "a whole number",
        "f64" => "a number",
        "path string" => "a path",
        "a sequence" => "an array",
        "a map" => "an object",
        _ => return error,
    };
    serde_json::Error::custom(format!("{said}, expected {expected}"))
}

/// The one of the `expected` fields that an unknown one most likely is. Both end with a backtick.
fn meant<'e>(name: &str, expected: &'e str) -> Option<&'e str> {
    let known = expected.split('`').skip(1).step_by(2);
    similar(name.strip_suffix('`')?, known)
}

/// A tree being deserialized.
struct Tree(Value);

impl<'de> Deserializer<'de> for Tree {
    type Error = serde_json::Error;

    fn deserialize_any<V: Visitor<'de>>(self, visitor: V) -> Result<V::Value, Self::Error> {
        let read = match self.0 {
            Value::Array(elements) => visitor.visit_seq(SeqDeserializer::new(elements.into_iter().map(Tree))),
            Value::Object(fields) => {
                let fields = fields.into_iter().map(|(name, value)| (name, Tree(value)));
                visitor.visit_map(MapDeserializer::new(fields))
            }
            other => other.deserialize_any(visitor),
        };
        read.map_err(plain)
    }

    fn deserialize_struct<V: Visitor<'de>>(
        self,
        _name: &'static str,
        fields: &'static [&'static str],
        visitor: V,
    ) -> Result<V::Value, Self::Error> {
        match self.0 {
            Value::Array(_) => Err(Self::Error::invalid_type(Unexpected::Seq, &"an object")),
            Value::Object(mut given) => {
                given.retain(|name, value| fields.contains(&name.as_str()) || !asks_for_nothing(value));
                Self(Value::Object(given)).deserialize_any(visitor)
            }
            other => Self(other).deserialize_any(visitor),
        }
    }

    fn deserialize_option<V: Visitor<'de>>(self, visitor: V) -> Result<V::Value, Self::Error> {
        if self.0.is_null() { visitor.visit_none() } else { visitor.visit_some(self) }
    }

    fn deserialize_newtype_struct<V: Visitor<'de>>(
        self,
        _name: &'static str,
        visitor: V,
    ) -> Result<V::Value, Self::Error> {
        visitor.visit_newtype_struct(self)
    }

    fn deserialize_enum<V: Visitor<'de>>(
        self,
        name: &'static str,
        variants: &'static [&'static str],
        visitor: V,
    ) -> Result<V::Value, Self::Error> {
        self.0.deserialize_enum(name, variants, visitor)
    }

    forward_to_deserialize_any! {
        bool i8 i16 i32 i64 i128 u8 u16 u32 u64 u128 f32 f64 char str string bytes byte_buf unit unit_struct seq tuple
        tuple_struct map identifier ignored_any
    }
}

impl IntoDeserializer<'_, serde_json::Error> for Tree {
    type Deserializer = Self;

    fn into_deserializer(self) -> Self {
        self
    }
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;
    use crate::body::SnapshotConfig;
    use crate::config::VmConfig;

    #[test]
    fn an_unknown_field_that_asks_for_nothing_is_passed_over() {
        let config = |extra: &Value| {
            json!({
                "x": extra, "payload": {"kernel": "k", "x": extra}, "cpus": {"boot_vcpus": 2, "x": extra},
                "net": [{"id": "n", "sriov_vfs": 1, "vfs": [{"index": 0, "x": extra}], "x": extra}],
                "disks": [{"path": "/d", "rate_limiter_config": {"ops": {"size": 1, "refill_time": 1, "x": extra}}}],
                "memory": {"size": 0, "zones": [{"id": "z", "size": 1 << 30, "x": extra}], "x": extra},
            })
        };
        let plain: VmConfig = typed(config(&Value::Null)).unwrap();
        assert_eq!((plain.cpus.boot_vcpus, plain.net[0].vfs.len()), (2, 1));
        for nothing in [json!(false), json!(0), json!(0.0), json!(""), json!([]), json!({})] {
            assert_eq!(typed::<VmConfig>(config(&nothing)).unwrap(), plain, "{nothing}");
        }
        for something in [json!(true), json!(1), json!(-0.5), json!("a"), json!([0]), json!({"y": false})] {
            let refused = |value| typed::<VmConfig>(value).unwrap_err().to_string();
            assert!(refused(config(&something)).contains("unknown field `x`"), "{something}");
            let deep = json!({"net": [{}, {"vfs": [{"index": 0, "x": something}]}]});
            assert!(refused(deep).starts_with("net[1].vfs[0]"), "{something}");
        }
    }

    #[test]
    fn a_wrong_type_is_named_in_the_words_of_json() {
        let refused = |net: Value| typed::<VmConfig>(json!({"net": [net]})).unwrap_err().to_string();
        let number = "expected a whole number from 0 to";
        assert_eq!(
            refused(json!({"sriov_vfs": "3"})),
            format!("net[0].sriov_vfs: invalid type: string \"3\", {number} 32512")
        );
        // Below the highest number of the type, but above that of the key: the plan refuses 40000.
        assert_eq!(
            refused(json!({"sriov_vfs": 70000})),
            format!("net[0].sriov_vfs: invalid value: integer `70000`, {number} 32512")
        );
        assert_eq!(
            refused(json!({"weight": "x"})),
            "net[0].weight: invalid type: string \"x\", expected a whole number from 1 to 100"
        );
        assert_eq!(
            refused(json!({"max_tx_rate": "10G"})),
            "net[0].max_tx_rate: invalid type: string \"10G\", expected a whole number of Mbit/s from 0 to 4294967295"
        );
        assert_eq!(
            refused(json!({"storm": -1})),
            format!("net[0].storm: invalid value: integer `-1`, {number} 4294967295")
        );
        assert_eq!(refused(json!({"vfs": 1})), "net[0].vfs: invalid type: integer `1`, expected an array");
        assert_eq!(refused(json!({"vdpa": 1})), "net[0].vdpa: invalid type: integer `1`, expected a path");
    }

    #[test]
    fn a_known_field_is_read_whatever_its_value_is() {
        let refused = typed::<SnapshotConfig>(json!({"destination_url": false})).unwrap_err().to_string();
        assert!(refused.starts_with("destination_url: "), "{refused}");
        assert_eq!(typed::<SnapshotConfig>(json!({"destination_url": ""})).unwrap().destination_url, "");
    }
}
