//! Features of Cloud Hypervisor, or of other SR-IOV implementations, that this version does not support yet: one table
//! for the command line, JSON and the API.
//!
//! A client may give such a key or JSON field at its default, as generated clients do; it is removed before the rest
//! becomes a typed configuration. Any other value is refused, never ignored. Unknown fields stay, and the typed
//! configuration refuses them, except those of a VM that are null. Output for clients has the defaults again.

mod place;
mod table;

use serde_json::{Map, Value};

use crate::config::error::{ConfigError, Problem};
use place::Place::{self, Endpoint, Field, Flag, Setting};
use table::TABLE;

pub use place::{Harmless, Missing, Object};
pub use table::IMAGE_TYPE;

fn places() -> impl Iterator<Item = (&'static str, &'static Place)> {
    TABLE.iter().flat_map(|missing| missing.places.iter().map(|place| (missing.what, place)))
}

/// The feature of an unsupported option of the command line, such as `--tpm`.
pub fn flag(option: &str) -> Option<&'static str> {
    places().find(|(_, place)| matches!(place, Flag(flag) if *flag == option)).map(|(what, _)| what)
}

/// All unsupported options of the command line.
pub fn flags() -> impl Iterator<Item = &'static str> {
    places().filter_map(|(_, place)| match place {
        Flag(flag) => Some(*flag),
        _ => None,
    })
}

/// The feature of an unsupported key of an option, and the values that request nothing.
pub fn key(option: &str, key: &str) -> Option<(&'static str, &'static Harmless)> {
    places().find_map(|(what, place)| match place {
        Setting(object, name, harmless) if object.option() == Some(option) && *name == key => Some((what, harmless)),
        _ => None,
    })
}

/// The feature of an unsupported endpoint of the API, such as `vm.snapshot`.
pub fn endpoint(name: &str) -> Option<&'static str> {
    places().find(|(_, place)| matches!(place, Endpoint(endpoint) if *endpoint == name)).map(|(what, _)| what)
}

/// All unsupported endpoints of the API.
pub fn endpoints() -> impl Iterator<Item = &'static str> {
    places().filter_map(|(_, place)| match place {
        Endpoint(endpoint) => Some(*endpoint),
        _ => None,
    })
}

impl Object {
    /// The unsupported fields of this object.
    pub fn fields(self) -> impl Iterator<Item = &'static str> {
        self.missing().map(|(_, field, _)| field)
    }

    /// The unsupported fields of this object, with their schemas for the API's description.
    pub(crate) fn schemas(self) -> impl Iterator<Item = (&'static str, Value)> {
        self.missing().map(|(what, field, harmless)| (field, harmless.schema(what)))
    }

    fn missing(self) -> impl Iterator<Item = (&'static str, &'static str, &'static Harmless)> {
        places().filter_map(move |(what, place)| match place {
            Setting(object, field, harmless) | Field(object, field, harmless) if *object == self => {
                Some((what, *field, harmless))
            }
            _ => None,
        })
    }

    /// The supported fields that are such objects, or arrays of them.
    const fn objects(self) -> &'static [(&'static str, Self)] {
        match self {
            Self::Vm => &[
                ("net", Self::Net),
                ("cpus", Self::Cpus),
                ("memory", Self::Memory),
                ("payload", Self::Payload),
                ("disks", Self::Disk),
                ("devices", Self::Device),
                ("platform", Self::Platform),
            ],
            Self::Memory => &[("zones", Self::MemoryZone)],
            Self::Net => &[("vfs", Self::Vf)],
            _ => &[],
        }
    }

    /// Removes the unsupported fields from `value`, which is at `path` of the document (empty for its root).
    ///
    /// Leaves a value that is not an object unchanged, for the typed configuration to refuse.
    ///
    /// # Errors
    ///
    /// Fails if one of those fields requests something.
    pub fn strip(self, value: &mut Value, path: &str) -> Result<(), ConfigError> {
        let Some(fields) = value.as_object_mut() else { return Ok(()) };
        for (what, field, harmless) in self.missing() {
            let Some(value) = fields.remove(field) else { continue };
            harmless.check(&value, fields, &join(path, field), what)?;
        }
        if self == Self::Vm {
            // Null counts as omitted, also for lists, which have no null.
            fields.retain(|_, value| !value.is_null());
        }
        for (field, object) in self.objects() {
            let path = join(path, field);
            match fields.get_mut(*field) {
                // Counts as omitted.
                Some(Value::Null) => _ = fields.remove(*field),
                Some(Value::Array(elements)) => {
                    for (index, element) in elements.iter_mut().enumerate() {
                        object.strip(element, &format!("{path}[{index}]"))?;
                    }
                }
                Some(value) => object.strip(value, &path)?,
                None => {}
            }
        }
        Ok(())
    }

    /// Adds the unsupported fields at their defaults to `value`, which is this object, as Cloud Hypervisor prints them.
    pub fn fill_in(self, value: &mut Value) {
        let Some(fields) = value.as_object_mut() else { return };
        for (_, field, harmless) in self.missing() {
            if let Some(default) = harmless.value() {
                fields.entry(field).or_insert(default);
            }
        }
        for (field, object) in self.objects() {
            match fields.get_mut(*field) {
                Some(Value::Array(elements)) => elements.iter_mut().for_each(|element| object.fill_in(element)),
                Some(value) => object.fill_in(value),
                None => {}
            }
        }
    }
}

impl Harmless {
    fn check(&self, value: &Value, siblings: &Map<String, Value>, path: &str, what: &str) -> Result<(), ConfigError> {
        let harmless = match (self, value) {
            (_, Value::Null) => true,
            (Self::Null(_) | Self::NullByte, _) => false,
            (Self::Word(word, option), value) => value.as_str().is_some_and(|text| [word, option].contains(&&text)),
            (Self::Empty(_), Value::Array(elements)) => elements.is_empty(),
            (Self::Empty(_), _) => false,
            (Self::If(harmless), value) => harmless(value, siblings),
        };
        if harmless { Ok(()) } else { Err(not_yet(path, what)) }
    }
}

fn not_yet(path: &str, what: &str) -> ConfigError {
    ConfigError::new(path, Problem::NotYet { what: what.to_string(), remedy: "leave it out".to_string() })
}

fn join(path: &str, field: &str) -> String {
    if path.is_empty() { field.to_string() } else { format!("{path}.{field}") }
}

#[cfg(test)]
mod tests;
