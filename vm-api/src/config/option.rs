//! Options: keys and help, and the code shared by all structs with `#[derive(Options)]`.
//!
//! The derive (`option-derive`) generates the command line, help and JSON of an ordinary struct.

use std::fmt;
use std::marker::PhantomData;

use serde::de::{DeserializeSeed, Error as _, MapAccess, Visitor};
use serde::ser::SerializeMap;
use serde::{Deserialize, Deserializer, Serializer};

use crate::config::error::{ConfigError, Problem};
use crate::config::grammar::{Pair, list, pairs};
use crate::config::keys::{self, Key};
use crate::config::unsupported::{self, Harmless};
use crate::config::value::{Bounds, Form, read};

/// A setting that may be omitted to inherit another one's.
pub(crate) trait Inherit<T> {
    /// This setting, or `base` if it is omitted.
    fn inherit(&self, base: &T) -> T;
}

impl<T: Clone> Inherit<T> for Option<T> {
    fn inherit(&self, base: &T) -> T {
        self.as_ref().unwrap_or(base).clone()
    }
}

impl<T: Clone> Inherit<Option<T>> for Option<T> {
    fn inherit(&self, base: &Option<T>) -> Option<T> {
        self.as_ref().or(base.as_ref()).cloned()
    }
}

/// A device, or another part of the VM, that a single option of the command line describes.
pub trait Options: Sized {
    /// The option: `--net`.
    const OPTION: &'static str;

    /// All keys, in the order of the help.
    fn keys() -> Vec<Key>;
}

/// A field with several keys on the command line, and an object in JSON.
pub(crate) trait Part: Sized {
    /// Keys, in the order of the help.
    fn keys() -> Vec<Key>;

    /// Takes its keys out of those of `option`, and returns the resulting value and the remaining keys.
    ///
    /// # Errors
    ///
    /// Fails for a wrong value, or a key without another that it needs.
    fn take(pairs: Vec<Pair>, option: &str) -> Result<(Self, Vec<Pair>), ConfigError>;

    /// Keys and values, as they read back.
    fn print(&self) -> Vec<(&'static str, String)>;
}

/// Argument of `ch-remote` that changes a setting of a running VM.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Argument {
    /// The setting's name: `max_tx_rate`.
    pub name: &'static str,
    /// The argument's name: `max-tx-rate`.
    pub long: &'static str,
    /// Name of the value in the help: `Mbit/s`.
    pub value_name: &'static str,
    /// Help, in one paragraph.
    pub about: &'static str,
    /// Form of the value.
    pub form: Form,
}

/// Fields of a struct, which `#[derive(Options)]` generates. They may be flattened into those of another.
pub(crate) trait Fields: Sized {
    /// Names in JSON, in the order of output and help.
    const FIELDS: &'static [&'static str];

    /// Fields before defaults: `None` for those that are not given.
    type Given: Default;

    /// Reads the value of the field `name` of `object`. False, without reading, if there is no such field.
    ///
    /// # Errors
    ///
    /// Fails for a wrong value, or a second one.
    fn read_field<'de, A: MapAccess<'de>>(
        given: &mut Self::Given,
        name: &str,
        object: &mut A,
    ) -> Result<bool, A::Error>;

    /// Takes out the keys of fields that are a [`Part`], and returns the remaining ones.
    ///
    /// # Errors
    ///
    /// As [`Part::take`].
    fn take_parts(given: &mut Self::Given, pairs: Vec<Pair>, option: &str) -> Result<Vec<Pair>, ConfigError>;

    /// Reads the value of `key`; `None` if there is no such key.
    fn read_key(given: &mut Self::Given, key: &str, text: &str) -> Option<Result<(), String>>;

    /// Fills in defaults.
    ///
    /// # Errors
    ///
    /// Fails with the name of a missing required field.
    fn resolve(given: Self::Given) -> Result<Self, &'static str>;

    /// Keys of the field `field`.
    fn keys_of(field: &str) -> Vec<Key>;

    /// Keys and values of the field `field` in their parsable form, without those that are unset.
    fn pairs_of(&self, field: &str) -> Vec<(&'static str, String)>;
}

/// Fields of a struct that is a part, or has one: as `#[derive(Options)]` serializes them.
pub(crate) trait Written: Fields {
    /// Adds the field `field` to `object`, unless it is left out.
    ///
    /// # Errors
    ///
    /// Fails with the serializer.
    fn write_field<M: SerializeMap>(&self, field: &str, object: &mut M) -> Result<(), M::Error>;
}

/// Fields that change those of a running VM, which `#[derive(Options)]` generates.
pub(crate) trait Changes: Fields {
    /// The argument that changes `field`.
    fn argument(field: &str) -> Option<Argument>;

    /// Sets the field of the argument `argument`; `None` if there is no such argument.
    fn set(&mut self, argument: &str, text: &str) -> Option<Result<(), String>>;

    /// Sets those of `settings` that are given here. Returns true if there are any.
    fn apply(&self, settings: &mut Self) -> bool;
}

/// The number of names in `groups`.
pub(crate) const fn count(groups: &[&[&str]]) -> usize {
    let (mut count, mut group) = (0, 0);
    while group < groups.len() {
        count += groups[group].len();
        group += 1;
    }
    count
}

const fn is_same(a: &str, b: &str) -> bool {
    let (a, b) = (a.as_bytes(), b.as_bytes());
    let mut at = 0;
    while at < a.len() && at < b.len() && a[at] == b[at] {
        at += 1;
    }
    at == a.len() && at == b.len()
}

const fn has(names: &[&str], name: &str) -> bool {
    let mut at = 0;
    while at < names.len() && !is_same(names[at], name) {
        at += 1;
    }
    at < names.len()
}

/// The names in `groups`: first those that are in `first`, in its order, then the others in theirs.
pub(crate) const fn in_order<const N: usize>(groups: &[&[&'static str]], first: &[&'static str]) -> [&'static str; N] {
    let (mut all, mut len, mut group) = ([""; N], 0, 0);
    while group < groups.len() {
        let mut at = 0;
        while at < groups[group].len() {
            all[len] = groups[group][at];
            (len, at) = (len + 1, at + 1);
        }
        group += 1;
    }
    let (mut names, mut len, mut at) = ([""; N], 0, 0);
    while at < first.len() {
        if has(&all, first[at]) {
            names[len] = first[at];
            len += 1;
        }
        at += 1;
    }
    at = 0;
    while at < N {
        if !has(first, all[at]) {
            names[len] = all[at];
            len += 1;
        }
        at += 1;
    }
    names
}

/// The keys of all fields.
pub(crate) fn keys<T: Fields>() -> Vec<Key> {
    T::FIELDS.iter().flat_map(|field| T::keys_of(field)).collect()
}

/// Sets `setting` if `change` is given. Returns true if it is.
pub(crate) fn apply<T: Clone>(change: &Option<T>, setting: &mut Option<T>) -> bool {
    if change.is_some() {
        setting.clone_from(change);
    }
    change.is_some()
}

/// Reads the text of an option.
///
/// # Errors
///
/// Fails with the fault of the option.
pub(crate) fn parse<T: Options + Fields>(text: &str) -> Result<T, ConfigError> {
    let wrong = |what| ConfigError::new(format!("{} {text}", T::OPTION), Problem::Syntax(what));
    from_pairs(pairs(text).map_err(wrong)?)
}

/// As [`parse`], for an option that is split into pairs.
///
/// # Errors
///
/// As [`parse`].
pub(crate) fn from_pairs<T: Options + Fields>(pairs: Vec<Pair>) -> Result<T, ConfigError> {
    let option = T::OPTION;
    keys::check_once(&pairs, option)?;
    let mut given = T::Given::default();
    for Pair { key, value } in T::take_parts(&mut given, pairs, option)? {
        let Some(value) = value else {
            return Err(ConfigError::new(format!("{option} {key}"), keys::without_value(&T::keys(), &key)));
        };
        let error = |problem| ConfigError::new(format!("{option} {key}={value}"), problem);
        keys::check_given(option, &key, &value).map_err(|what| error(Problem::Syntax(what)))?;
        match (T::read_key(&mut given, &key, &value), unsupported::key(option, &key)) {
            (Some(Ok(())), _) => {}
            (Some(Err(what)), _) => return Err(error(Problem::Syntax(what))),
            (None, Some((what, harmless))) => check_harmless(harmless, &value, what, &key).map_err(error)?,
            (None, None) => return Err(error(keys::unknown(option, &T::keys(), &key))),
        }
    }
    T::resolve(given).map_err(missing::<T>)
}

/// Checks that the raw value of the unsupported `key` requests nothing.
fn check_harmless(harmless: &Harmless, raw: &str, what: &str, key: &str) -> Result<(), Problem> {
    let harmless = match harmless {
        Harmless::Word(_, word) => {
            read::<String>(raw).map(|text| text.is_none_or(|text| text.eq_ignore_ascii_case(word)))
        }
        Harmless::Empty(_) => list(raw).map(|elements| elements.is_empty()),
        Harmless::Null(_) | Harmless::NullByte => read::<String>(raw).map(|text| text.is_none()),
        Harmless::If(is_harmless) => {
            read::<bool>(raw).map(|value| value.is_none_or(|value| is_harmless(&value.into(), &serde_json::Map::new())))
        }
    };
    match harmless {
        Ok(true) => Ok(()),
        // An unparsable value is not a default, either.
        Ok(false) | Err(_) => Err(Problem::NotYet { what: what.to_string(), remedy: format!("leave {key} out") }),
    }
}

/// The error for a missing required field.
fn missing<T: Options>(field: &str) -> ConfigError {
    ConfigError::new(T::OPTION, Problem::Syntax(format!("{field} is required; add it")))
}

/// Prints an option as text that parses as the same option.
pub(crate) fn print<T: Fields>(config: &T, f: &mut fmt::Formatter<'_>) -> fmt::Result {
    let pairs = T::FIELDS.iter().flat_map(|field| config.pairs_of(field));
    f.write_str(&pairs.map(|(key, value)| format!("{key}={value}")).collect::<Vec<_>>().join(","))
}

/// Parses an option from JSON. A null field counts as omitted.
///
/// # Errors
///
/// Fails for an unknown field, a wrong value, or a missing required field.
pub(crate) fn deserialize<'de, T: Options + Fields, D: Deserializer<'de>>(deserializer: D) -> Result<T, D::Error> {
    T::resolve(given::<T, D>(deserializer)?).map_err(|field| D::Error::custom(missing::<T>(field)))
}

/// As [`deserialize`], for the body of a request.
///
/// # Errors
///
/// As [`deserialize`].
pub(crate) fn deserialize_body<'de, T: Fields, D: Deserializer<'de>>(deserializer: D) -> Result<T, D::Error> {
    T::resolve(given::<T, D>(deserializer)?).map_err(D::Error::missing_field)
}

fn given<'de, T: Fields, D: Deserializer<'de>>(deserializer: D) -> Result<T::Given, D::Error> {
    deserializer.deserialize_struct("Given", T::FIELDS, Object::<T>(PhantomData))
}

/// Visitor of a JSON object with the fields of `T`.
struct Object<T>(PhantomData<T>);

impl<'de, T: Fields> Visitor<'de> for Object<T> {
    type Value = T::Given;

    fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("an object")
    }

    fn visit_map<A: MapAccess<'de>>(self, mut object: A) -> Result<T::Given, A::Error> {
        let mut given = T::Given::default();
        while let Some(name) = object.next_key_seed(Name(T::FIELDS))? {
            T::read_field(&mut given, name, &mut object)?;
        }
        Ok(given)
    }
}

/// Name of a field, which is one of these.
struct Name(&'static [&'static str]);

impl<'de> DeserializeSeed<'de> for Name {
    type Value = &'static str;

    fn deserialize<D: Deserializer<'de>>(self, deserializer: D) -> Result<&'static str, D::Error> {
        deserializer.deserialize_identifier(self)
    }
}

impl Visitor<'_> for Name {
    type Value = &'static str;

    fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("field identifier")
    }

    fn visit_str<E: serde::de::Error>(self, name: &str) -> Result<&'static str, E> {
        let known = self.0.iter().find(|known| **known == name);
        known.copied().ok_or_else(|| E::unknown_field(name, self.0))
    }
}

/// Reads the value of the field `name` of `object`.
///
/// # Errors
///
/// Fails for a wrong value, or a second one.
pub(crate) fn read_field<'de, T: Deserialize<'de>, A: MapAccess<'de>>(
    field: &mut Option<T>,
    name: &'static str,
    object: &mut A,
) -> Result<(), A::Error> {
    if field.is_some() {
        return Err(A::Error::duplicate_field(name));
    }
    *field = object.next_value()?;
    Ok(())
}

/// As [`read_field`], of a field that is a key of the command line, too: a number has the same bounds in both.
///
/// # Errors
///
/// As [`read_field`].
pub(crate) fn read_number<'de, T: Deserialize<'de>, A: MapAccess<'de>>(
    field: &mut Option<T>,
    name: &'static str,
    object: &mut A,
    bounds: Bounds,
) -> Result<(), A::Error> {
    let explained = |error: A::Error| match bounds.explain_json(&error.to_string()) {
        Some(line) => A::Error::custom(line),
        None => error,
    };
    read_field(field, name, object).map_err(explained)
}

/// Serializes the fields of `config` as an object.
pub(crate) fn serialize<T: Written, S: Serializer>(config: &T, serializer: S) -> Result<S::Ok, S::Error> {
    let mut object = serializer.serialize_map(None)?;
    for field in T::FIELDS {
        config.write_field(field, &mut object)?;
    }
    object.end()
}

/// The most used keys of an option, which its help has first.
const FIRST_IN_HELP: (&str, &[&str]) = ("--net", &["id", "tap", "mac", "sriov_vfs", "switch"]);

/// The help text of an option: a line for each key, with its description below.
pub fn help<T: Options>() -> String {
    let paragraph = |key: Key| {
        let default = key.default.map(|value| format!(" [default: {value}]")).unwrap_or_default();
        format!("{}={}\n        {}{default}", key.name, key.syntax, key.about)
    };
    let (option, first) = FIRST_IN_HELP;
    let mut keys = T::keys();
    if T::OPTION == option {
        keys.sort_by_key(|key| first.iter().position(|name| *name == key.name).unwrap_or(first.len()));
    }
    keys.into_iter().map(paragraph).collect::<Vec<_>>().join("\n")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_that_come_first_are_followed_by_the_others() {
        const GROUPS: &[&[&str]] = &[&["a", "bb"], &[], &["c", "b"]];
        assert_eq!(in_order::<{ count(GROUPS) }>(GROUPS, &["c", "x", "a"]), ["c", "a", "bb", "b"]);
        assert_eq!(in_order::<4>(GROUPS, &[]), ["a", "bb", "c", "b"]);
    }
}
