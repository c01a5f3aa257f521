//! Description of the API's JSON types as schemas of OpenAPI 3.0.
//!
//! `#[derive(Schema)]` describes a type; [`components`] collects all. `api/openapi.yaml` is generated from them.

use std::collections::BTreeMap;
use std::net::IpAddr;
use std::path::PathBuf;

use serde::Serialize;
use serde::de::DeserializeOwned;
use serde_json::{Map, Value, json};

/// A type that a field of JSON can have.
pub(crate) trait Schema {
    /// The schema: that of a primitive type in full, a reference to a component otherwise.
    fn describe(components: &mut Components) -> Value;
}

/// A type with a schema of its own, or with fields that are flattened into those of others.
pub(crate) trait Component {
    /// The schema's name.
    const NAME: &'static str;

    /// The schema; adds those that it refers to.
    fn define(components: &mut Components) -> Definition;
}

/// Keywords with their numbers.
pub(crate) type Bounds = &'static [(&'static str, u32)];

/// A device's id.
pub(crate) const ID: Bounds = &[("minLength", 1), ("maxLength", 255)];
/// A device's number on its bus.
pub(crate) const SLOT: Bounds = &[("maximum", 31)];
/// A path of a socket.
pub(crate) const SOCKET: Bounds = &[("minLength", 1), ("maxLength", 107)];
/// A name of a network interface.
pub(crate) const INTERFACE: Bounds = &[("minLength", 1), ("maxLength", 15)];
/// The size of a queue.
pub(crate) const QUEUE_SIZE: Bounds = &[("minimum", 2), ("maximum", 32_768)];

/// The schemas of all types, in the order in which they refer to each other.
#[derive(Debug, Default)]
pub struct Components(Vec<Definition>);

/// A schema with a name.
#[derive(Debug, Clone, PartialEq)]
pub struct Definition {
    /// Name.
    pub name: String,
    /// Keywords except those of its properties.
    pub keywords: Map<String, Value>,
    /// Names and schemas of an object's fields, in their order.
    pub properties: Vec<(String, Value)>,
}

/// A field of an object.
pub(crate) struct Property<'a> {
    pub name: &'static str,
    /// Names that are read, too.
    pub others: &'a [&'static str],
    pub about: &'a str,
    pub is_required: bool,
    pub is_nullable: bool,
    pub default: Option<Value>,
    pub limits: Bounds,
    pub bounds: Vec<(&'static str, Value)>,
    /// Keywords of the elements of an array.
    pub items: Vec<(&'static str, Value)>,
    pub schema: Value,
}

impl Property<'_> {
    /// A required field without a description.
    pub(crate) fn required(name: &'static str, schema: Value) -> Self {
        Self {
            name,
            others: &[],
            about: "",
            is_required: true,
            is_nullable: false,
            default: None,
            limits: &[],
            bounds: Vec::new(),
            items: Vec::new(),
            schema,
        }
    }

    /// The schema of the field.
    fn schema(&self) -> Value {
        let about = (!self.about.is_empty()).then(|| ("description".to_string(), plain(self.about)));
        if self.schema.get("$ref").is_some() {
            // Keywords next to a reference have no effect.
            return if self.is_nullable {
                let mut nullable = Map::from_iter(about);
                nullable.insert("nullable".to_string(), true.into());
                nullable.insert("allOf".to_string(), json!([self.schema]));
                nullable.into()
            } else {
                self.schema.clone()
            };
        }
        let mut schema = self.schema.clone();
        let Value::Object(keywords) = &mut schema else { return schema };
        keywords.extend(about);
        keywords.extend(self.is_nullable.then(|| ("nullable".to_string(), true.into())));
        keywords.extend(self.default.iter().map(|default| ("default".to_string(), default.clone())));
        keywords.extend(self.limits.iter().map(|(word, bound)| (word.to_string(), Value::from(*bound))));
        keywords.extend(self.bounds.iter().map(|(word, bound)| (word.to_string(), bound.clone())));
        if let Some(Value::Object(items)) = keywords.get_mut("items") {
            items.extend(self.items.iter().map(|(word, bound)| (word.to_string(), bound.clone())));
        }
        schema
    }
}

/// A doc comment as text of the description: without links.
fn plain(about: &str) -> Value {
    about.replace("[`", "").replace("`]", "").replace('`', "").into()
}

/// The default of a field, if its schema can have it: a single value.
pub(crate) fn value_of<T: Serialize>(default: &T) -> Option<Value> {
    let value = serde_json::to_value(default).ok()?;
    (value.is_boolean() || value.is_number() || value.is_string()).then_some(value)
}

impl Definition {
    fn new(name: &str, about: &str, kind: &str) -> Self {
        let keywords = [("type", kind.into()), ("description", plain(about))];
        let keywords = keywords.into_iter().map(|(word, value)| (word.to_string(), value)).collect();
        Self { name: name.to_string(), keywords, properties: Vec::new() }
    }

    /// An object without fields.
    pub(crate) fn object(name: &str, about: &str) -> Self {
        Self::new(name, about, "object")
    }

    /// A string that is one of `words`, each with its synonyms and its meaning.
    pub(crate) fn words(name: &str, about: &str, words: &[(&[&str], &str)], default: Option<&str>) -> Self {
        let meanings = words.iter().filter_map(|(texts, about)| Some(format!("{}: {about}", texts.first()?)));
        let about = std::iter::once(about.to_string()).chain(meanings).collect::<Vec<_>>().join(" ");
        let mut definition = Self::new(name, &about, "string");
        let texts: Vec<_> = words.iter().flat_map(|(texts, _)| texts.iter().copied()).collect();
        let names: Vec<_> = texts.iter().map(|text| format!("{name}{}", identifier(text))).collect();
        definition.keywords.insert("enum".to_string(), json!(texts));
        definition.keywords.insert("x-enum-varnames".to_string(), json!(names));
        definition.keywords.extend(default.map(|default| ("default".to_string(), default.into())));
        definition
    }

    /// A value that is one of several types, described by keywords.
    pub(crate) fn other(name: &str, keywords: Value) -> Self {
        let Value::Object(keywords) = keywords else { return Self::object(name, "") };
        Self { name: name.to_string(), keywords, properties: Vec::new() }
    }

    fn require(&mut self, field: &str) {
        if let Value::Array(required) = self.keywords.entry("required").or_insert_with(|| json!([])) {
            required.push(field.into());
        }
    }

    /// Adds a field, after its other names' fields.
    pub(crate) fn add(&mut self, property: Property<'_>) {
        if property.is_required {
            self.require(property.name);
        }
        self.properties.push((property.name.to_string(), property.schema()));
        let Property { name, others, .. } = property;
        let about = format!("Another name of {name}.");
        let other = Property { about: &about, ..property }.schema();
        self.properties.extend(others.iter().map(|name| (name.to_string(), other.clone())));
    }

    /// Adds the fields of `part`, which is flattened.
    pub(crate) fn include(&mut self, part: Self) {
        self.properties.extend(part.properties);
        for field in part.keywords.get("required").and_then(Value::as_array).into_iter().flatten() {
            self.require(field.as_str().unwrap_or_default());
        }
    }

    /// Sets a keyword of a field.
    pub(crate) fn limit(&mut self, field: &str, word: &str, bound: u32) {
        for (_, schema) in self.properties.iter_mut().filter(|(name, _)| name == field) {
            schema[word] = bound.into();
        }
    }

    /// Adds fields that are not supported yet.
    pub(crate) fn add_unsupported(&mut self, fields: impl Iterator<Item = (&'static str, Value)>) {
        self.properties.extend(fields.map(|(field, schema)| (field.to_string(), schema)));
    }
}

/// The word as a part of an identifier: `802.1q` is `8021q`, and `link-down` is `LinkDown`.
fn identifier(text: &str) -> String {
    let parts = text.split(|c: char| !c.is_alphanumeric());
    parts.map(|part| part[..part.len().min(1)].to_uppercase() + part.get(1..).unwrap_or_default()).collect()
}

/// A reference to a component.
pub(crate) fn reference(name: &str) -> Value {
    json!({"$ref": format!("#/components/schemas/{name}")})
}

impl Components {
    /// The components, in the order in which they were first referred to.
    pub(crate) fn into_definitions(self) -> Vec<Definition> {
        self.0
    }

    /// A reference to a component, which is added.
    pub(crate) fn reference<T: Component + DeserializeOwned>(&mut self) -> Value {
        if self.0.iter().all(|known| known.name != T::NAME) {
            // Holds the place before those that the type refers to.
            let place = self.0.len();
            self.0.push(Definition::object(T::NAME, ""));
            self.0[place] = T::define(self);
            #[cfg(test)]
            tests::compare::<T>(&self.0[place]);
        }
        reference(T::NAME)
    }

    /// As [`Components::reference`], for a copy of the schema with another name and description.
    pub(crate) fn named<T: Component>(&mut self, name: &str, about: &str) -> Value {
        let mut definition = T::define(self);
        definition.name = name.to_string();
        definition.keywords.insert("description".to_string(), plain(about));
        self.0.push(definition);
        reference(name)
    }
}

/// Implements [`Schema`] for types that have no name in the description.
macro_rules! primitive {
    ($($ty:ty => $schema:tt),* $(,)?) => {$(
        impl Schema for $ty {
            fn describe(_: &mut Components) -> Value {
                json!($schema)
            }
        }
    )*};
}
primitive! {
    bool => {"type": "boolean"},
    String => {"type": "string"},
    PathBuf => {"type": "string"},
    IpAddr => {"type": "string"},
    u8 => {"type": "integer", "format": "int32", "minimum": 0, "maximum": (u8::MAX)},
    u16 => {"type": "integer", "format": "int32", "minimum": 0, "maximum": (u16::MAX)},
    u32 => {"type": "integer", "format": "int64", "minimum": 0, "maximum": (u32::MAX)},
    std::num::NonZeroU32 => {"type": "integer", "format": "int64", "minimum": 1, "maximum": (u32::MAX)},
    u64 => {"type": "integer", "format": "int64", "minimum": 0},
    usize => {"type": "integer", "format": "int32", "minimum": 0},
    i32 => {"type": "integer", "format": "int32"},
}

impl<T: Schema> Schema for Option<T> {
    fn describe(components: &mut Components) -> Value {
        T::describe(components)
    }
}

impl<T: Schema> Schema for Vec<T> {
    fn describe(components: &mut Components) -> Value {
        json!({"type": "array", "items": T::describe(components)})
    }
}

impl<T: Schema> Schema for BTreeMap<String, T> {
    fn describe(components: &mut Components) -> Value {
        json!({"type": "object", "additionalProperties": T::describe(components)})
    }
}

#[cfg(test)]
mod tests;
