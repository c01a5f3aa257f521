use std::collections::BTreeSet;
use std::fmt;

use option_derive::Schema;
use serde::Deserialize;
use serde::de::{self, DeserializeOwned, Visitor};

use super::*;
use crate::openapi::components;

/// The names under which serde reads a struct's fields or an enum's variants.
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

/// Compares the definition of `T` with what serde reads: the derive reads serde's attributes on its own.
pub(super) fn compare<T: DeserializeOwned>(definition: &Definition) {
    let Definition { name, keywords, properties } = definition;
    if keywords.contains_key("oneOf") || keywords["type"] == "array" {
        return;
    }
    let mut read = Vec::new();
    let _ = T::deserialize(Names(&mut read));
    // A second spelling, which clients would have as a second field.
    let read: BTreeSet<_> = read.into_iter().filter(|name| *name != "generic-vhost-user").collect();
    if let Some(words) = keywords.get("enum").and_then(Value::as_array) {
        assert_eq!(words.iter().filter_map(Value::as_str).collect::<BTreeSet<_>>(), read, "{name}");
        return;
    }
    let is_supported = |schema: &Value| !schema["description"].as_str().unwrap_or_default().starts_with("Not yet: ");
    let described = properties.iter().filter(|(_, schema)| is_supported(schema)).map(|(field, _)| field.as_str());
    assert_eq!(described.collect::<BTreeSet<_>>(), read, "{name}");
    // The command line may leave the payload out of its file, because it has options for it.
    if name != "VmConfig" {
        let is_empty_enough = serde_json::from_value::<T>(json!({})).is_ok();
        assert_eq!(is_empty_enough, !keywords.contains_key("required"), "what {name} requires");
    }
}

#[test]
fn each_component_is_there_once_and_is_what_serde_reads() {
    let all = components();
    assert!(all.len() > 60, "{}", all.len());
    for (index, one) in all.iter().enumerate() {
        assert!(all[..index].iter().all(|other| other.name != one.name), "{} is there twice", one.name);
        assert_ne!(one.keywords["description"], "", "{}", one.name);
        for (field, schema) in &one.properties {
            assert!(schema.get("$ref").is_some() || schema.get("description").is_some(), "{}.{field}", one.name);
        }
    }
}

#[test]
fn a_required_field_is_never_null() {
    for one in components() {
        let required = one.keywords.get("required").and_then(Value::as_array);
        for field in required.into_iter().flatten() {
            let property = one.properties.iter().find(|(name, _)| *field == **name);
            let schema = &property.unwrap_or_else(|| panic!("{}.{field} is missing", one.name)).1;
            assert!(schema.get("nullable").is_none(), "{}.{field}", one.name);
        }
    }
}

/// Part of another object.
#[derive(Deserialize, Schema)]
#[serde(deny_unknown_fields)]
struct Part {
    /// First.
    #[schema(maximum = 9)]
    first: u8,
    /// Second.
    second: Option<Vec<Word>>,
}

/// A word.
#[derive(Deserialize, Schema)]
#[serde(rename_all = "kebab-case")]
enum Word {
    /// This.
    LinkDown,
    /// That.
    #[serde(rename = "802.1q")]
    Tag,
}

/// The whole.
#[derive(Deserialize, Schema)]
#[schema(name = "All")]
struct Whole {
    #[serde(flatten)]
    part: Part,
    /// Third.
    #[serde(default)]
    third: bool,
}

#[test]
fn a_flattened_part_has_its_fields_in_the_whole() {
    let mut components = Components::default();
    let Definition { name, keywords, properties } = Whole::define(&mut components);
    assert_eq!((name.as_str(), &keywords["required"]), ("All", &json!(["first"])));
    let first = json!({"type": "integer", "format": "int32", "minimum": 0, "maximum": 9, "description": "First."});
    let second = json!({
        "type": "array",
        "nullable": true,
        "items": {"$ref": "#/components/schemas/Word"},
        "description": "Second.",
    });
    let third = json!({"type": "boolean", "description": "Third."});
    let expected = [("first", first), ("second", second), ("third", third)];
    assert_eq!(properties, expected.map(|(name, schema)| (name.to_string(), schema)));
    assert_eq!(components.0.len(), 1);
    let word = &components.0[0].keywords;
    assert_eq!(word["description"], "A word. link-down: This. 802.1q: That.");
    assert_eq!(word["x-enum-varnames"], json!(["WordLinkDown", "Word8021q"]));
    let whole: Whole = serde_json::from_value(json!({"first": 1, "second": ["802.1q", "link-down"]})).unwrap();
    let Whole { part: Part { first: 1, second: Some(words) }, third: false } = whole else { panic!() };
    assert!(matches!(words[..], [Word::Tag, Word::LinkDown]));
}
