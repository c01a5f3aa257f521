//! The values that keys can have, and the table that makes one type of struct, JSON, command line and help.

use std::net::IpAddr;
use std::path::PathBuf;

use crate::config_error::ConfigError;
use crate::config_mac::MacAddress;
use crate::config_options::{Pair, list, quote, unquote};

/// The type of a key's value on the command line.
pub(crate) trait Value: Sized {
    /// Reads a value that is not empty: an empty one leaves its key unset.
    ///
    /// # Errors
    ///
    /// What is wrong, and what would be right.
    fn parse(text: &str) -> Result<Self, String>;

    /// The value as it reads back, or `None` where the key is left out.
    fn print(&self) -> Option<String>;
}

/// Whether JSON leaves a field out.
pub(crate) trait Unset {
    /// True for what is not set at all.
    fn is_unset(&self) -> bool {
        false
    }
}

impl<T: Value> Value for Option<T> {
    fn parse(text: &str) -> Result<Self, String> {
        T::parse(text).map(Some)
    }

    fn print(&self) -> Option<String> {
        self.as_ref().and_then(T::print)
    }
}

impl<T> Unset for Option<T> {
    fn is_unset(&self) -> bool {
        self.is_none()
    }
}

impl<T> Unset for Vec<T> {
    fn is_unset(&self) -> bool {
        self.is_empty()
    }
}

impl Value for bool {
    fn parse(text: &str) -> Result<Self, String> {
        match text.to_ascii_lowercase().as_str() {
            "on" | "true" => Ok(true),
            "off" | "false" => Ok(false),
            _ => Err("give on or off".to_string()),
        }
    }

    fn print(&self) -> Option<String> {
        Some(if *self { "on" } else { "off" }.to_string())
    }
}

impl Unset for bool {}

/// Decimal digits alone: `parse` of the standard library would take a sign.
pub(crate) fn digits(text: &str) -> Option<&str> {
    (!text.is_empty() && text.bytes().all(|b| b.is_ascii_digit())).then_some(text)
}

macro_rules! whole_number {
    ($($ty:ty),*) => {$(
        impl Value for $ty {
            fn parse(text: &str) -> Result<Self, String> {
                let number = digits(text).and_then(|digits| digits.parse().ok());
                number.ok_or_else(|| format!("give a whole number from 0 to {}", <$ty>::MAX))
            }

            fn print(&self) -> Option<String> {
                Some(self.to_string())
            }
        }

        impl Unset for $ty {}
    )*};
}
whole_number!(u8, u16, u32);

/// A number of bytes.
impl Value for u64 {
    fn parse(text: &str) -> Result<Self, String> {
        let (number, shift) = match text.as_bytes().last() {
            Some(b'K') => (&text[..text.len() - 1], 10),
            Some(b'M') => (&text[..text.len() - 1], 20),
            Some(b'G') => (&text[..text.len() - 1], 30),
            _ => (text, 0),
        };
        let number = digits(number).and_then(|digits| digits.parse::<Self>().ok());
        number
            .and_then(|number| number.checked_mul(1 << shift))
            .ok_or_else(|| "give a number of bytes, or one with K, M or G, as 512M".to_string())
    }

    fn print(&self) -> Option<String> {
        Some(bytes(*self))
    }
}

/// A number of bytes, as a user would write it: `1536M`.
pub(crate) fn bytes(number: u64) -> String {
    match number.trailing_zeros() {
        _ if number == 0 => "0".to_string(),
        0..10 => number.to_string(),
        10..20 => format!("{}K", number >> 10),
        20..30 => format!("{}M", number >> 20),
        _ => format!("{}G", number >> 30),
    }
}

impl Unset for u64 {}

/// A list of numbers and ascending ranges, as `[3,5-7]`.
impl Value for Vec<i32> {
    fn parse(text: &str) -> Result<Self, String> {
        /// Far more than a process can have open, and far less than it has memory for.
        const LONGEST: usize = 65_536;
        let wrong = || "give a list of numbers, as [3,4] or [3-6]".to_string();
        let number = |text: &str| digits(text).and_then(|digits| digits.parse::<i32>().ok()).ok_or_else(wrong);
        let mut numbers = Self::new();
        for element in list(text)? {
            let (first, last) = match element.split_once('-') {
                Some((first, last)) => (number(first)?, number(last)?),
                None => (number(&element)?, number(&element)?),
            };
            if first > last || (first == last && element.contains('-')) {
                return Err("a range must ascend".to_string());
            }
            numbers.extend((first..=last).take(LONGEST + 1));
            if numbers.len() > LONGEST {
                return Err(format!("the list is longer than {LONGEST} numbers"));
            }
        }
        Ok(numbers)
    }

    fn print(&self) -> Option<String> {
        let numbers: Vec<_> = self.iter().map(i32::to_string).collect();
        (!self.is_empty()).then(|| format!("[{}]", numbers.join(",")))
    }
}

impl Value for String {
    fn parse(text: &str) -> Result<Self, String> {
        Ok(text.to_string())
    }

    fn print(&self) -> Option<String> {
        Some(quote(self))
    }
}

impl Unset for PathBuf {}

impl Value for PathBuf {
    fn parse(text: &str) -> Result<Self, String> {
        Ok(text.into())
    }

    fn print(&self) -> Option<String> {
        Some(quote(&self.to_string_lossy()))
    }
}

impl Value for MacAddress {
    fn parse(text: &str) -> Result<Self, String> {
        text.parse().map_err(|error: crate::config_mac::ParseMacError| error.to_string())
    }

    fn print(&self) -> Option<String> {
        Some(self.to_string())
    }
}

impl Value for IpAddr {
    fn parse(text: &str) -> Result<Self, String> {
        text.parse().map_err(|_| "not an IP address; write it as 192.168.249.1".to_string())
    }

    fn print(&self) -> Option<String> {
        Some(self.to_string())
    }
}

/// Reads a value as it was split off; `None` for an empty one, which leaves its key unset.
pub(crate) fn read<T: Value>(raw: &str) -> Result<Option<T>, String> {
    // A list is taken apart before its quotes are.
    let text = if raw.starts_with('[') { raw.to_string() } else { unquote(raw)? };
    if text.is_empty() { Ok(None) } else { T::parse(&text).map(Some) }
}

/// One key of an option, for its help.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Key {
    /// The key's name: `num_queues`.
    pub name: &'static str,
    /// What its value looks like: `<number>`.
    pub syntax: &'static str,
    /// The value that applies when the key is left out, if there is one.
    pub default: Option<String>,
    /// What it is for, in one paragraph.
    pub about: String,
}

/// A device, or another part of the VM, that the command line describes by one option.
pub trait Options: Sized {
    /// The option: `--net`.
    const OPTION: &'static str;

    /// All keys, in the order of the help.
    fn keys() -> Vec<Key>;
}

/// What several keys of an option describe, and one object in JSON.
pub(crate) trait Part: Sized {
    /// Its keys, in the order of the help.
    fn keys() -> Vec<Key>;

    /// Takes its own keys out of those of `option`, and says what they make and which are left.
    ///
    /// # Errors
    ///
    /// A value that is wrong, or keys that make nothing together.
    fn take(pairs: Vec<Pair>, option: &str) -> Result<(Option<Self>, Vec<Pair>), ConfigError>;

    /// Its keys and values, as they read back.
    fn print(&self) -> Vec<(&'static str, String)>;
}

/// The help text of an option: a line for each key and its description below.
pub fn help<T: Options>() -> String {
    let paragraph = |key: Key| {
        let default = key.default.map(|value| format!(" [default: {value}]")).unwrap_or_default();
        format!("{}={}\n        {}{default}", key.name, key.syntax, key.about)
    };
    T::keys().into_iter().map(paragraph).collect::<Vec<_>>().join("\n")
}

/// Makes a configuration type from one table: the struct, its JSON, its command line, its help and its defaults.
///
/// A line is `"key" = "<syntax>" => field: Type = default;`. The key is the command line's name and `field` JSON's. Without
/// `"key" = "<syntax>" =>` only JSON has the field. `, required` after the default makes a value that has to be given. A default
/// may name the fields above it, and says so by `, derived`: the help then shows none. `parts` lists fields that
/// are each a [`Part`] with keys of its own. `later` lists keys that Cloud Hypervisor has and this version has not.
macro_rules! options {
    (
        $(#[doc = $about:literal])+
        pub struct $name:ident for $option:literal {
            $(
                $(#[doc = $doc:literal])+
                $($key:literal = $syntax:literal =>)? $field:ident : $ty:ty = $default:expr $(, $kind:ident)? ;
            )*
        }
        $( parts { $( $(#[doc = $part_doc:literal])+ $part:ident : $part_ty:ty; )* } )?
        later { $( $($later:literal)|+ => $what:literal; )* }
    ) => {
        $(#[doc = $about])+
        #[derive(Debug, Clone, PartialEq, Eq, serde::Serialize)]
        pub struct $name {
            $(
                $(#[doc = $doc])+
                #[serde(skip_serializing_if = "crate::config_value::Unset::is_unset")]
                pub $field: $ty,
            )*
            $( $(
                $(#[doc = $part_doc])+
                #[serde(skip_serializing_if = "Option::is_none")]
                pub $part: Option<$part_ty>,
            )* )?
        }

        const _: () = {
            use crate::config_error::{ConfigError, Problem};
            use crate::config_options::{Pair, pairs};
            use crate::config_value::{Key, Options, Value, read};

            /// What the command line or JSON says, before defaults.
            #[derive(Default, serde::Deserialize)]
            #[serde(deny_unknown_fields, expecting = "an object")]
            struct Given {
                $(
                    #[serde(default)]
                    $field: Option<$ty>,
                )*
                $( $(
                    #[serde(default)]
                    $part: Option<$part_ty>,
                )* )?
            }

            impl Given {
                fn or_default(self) -> Result<$name, ConfigError> {
                    $(
                        let $field: $ty = match self.$field {
                            Some(value) => value,
                            None => options!(@default $option, $field, $default $(, $kind)?),
                        };
                    )*
                    Ok($name { $($field,)* $( $($part: self.$part,)* )? })
                }
            }

            impl $name {
                /// The option taken apart. The pairs that are another type's have been taken out.
                #[allow(dead_code, reason = "only some options share their text with another type")]
                pub(crate) fn from_pairs(pairs: Vec<Pair>) -> Result<Self, ConfigError> {
                    let mut given = Given::default();
                    $( $(
                        let (part, pairs) = <$part_ty as crate::config_value::Part>::take(pairs, $option)?;
                        given.$part = part;
                    )* )?
                    for Pair { key, value } in pairs {
                        let Some(value) = value else {
                            let what = "a key without a value; write key=value".to_string();
                            return Err(ConfigError::new(format!("{} {key}", $option), Problem::Syntax(what)));
                        };
                        let subject = || format!("{} {key}={value}", $option);
                        let wrong = |what| ConfigError::new(subject(), Problem::Syntax(what));
                        match key.as_str() {
                            $($( $key => given.$field = read(&value).map_err(wrong)?, )?)*
                            $( $($later)|+ => if !value.is_empty() {
                                let remedy = format!("leave {key} out");
                                return Err(ConfigError::new(subject(), Problem::NotYet { what: $what.to_string(), remedy }));
                            }, )*
                            _ => {
                                let what = concat!("unknown key; --help lists those of ", $option).to_string();
                                return Err(ConfigError::new(subject(), Problem::Syntax(what)));
                            }
                        }
                    }
                    given.or_default()
                }
            }

            impl Default for $name {
                fn default() -> Self {
                    $( let $field: $ty = $default; )*
                    Self { $($field,)* $( $($part: None,)* )? }
                }
            }

            impl Options for $name {
                const OPTION: &'static str = $option;

                fn keys() -> Vec<Key> {
                    let default = Self::default();
                    let mut keys = Vec::new();
                    $(
                        // None or one: a field without a key is JSON's alone.
                        let key: Vec<(_, _, Option<String>)> = vec![$(($key, $syntax, default.$field.print()))?];
                        keys.extend(key.into_iter().map(|(name, syntax, value)| Key {
                            name,
                            syntax,
                            default: value.filter(|_| stringify!($($kind)?).is_empty()),
                            about: [$($doc),+].map(str::trim).join(" "),
                        }));
                    )*
                    $( $( keys.extend(<$part_ty as crate::config_value::Part>::keys()); )* )?
                    keys
                }
            }

            impl std::str::FromStr for $name {
                type Err = ConfigError;

                fn from_str(text: &str) -> Result<Self, ConfigError> {
                    let wrong = |what| ConfigError::new(format!("{} {text}", $option), Problem::Syntax(what));
                    Self::from_pairs(pairs(text).map_err(wrong)?)
                }
            }

            impl std::fmt::Display for $name {
                fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
                    let mut parts: Vec<String> = Vec::new();
                    $($( parts.extend(self.$field.print().map(|value| format!("{}={value}", $key))); )?)*
                    $( $(
                        let keys = self.$part.iter().flat_map(crate::config_value::Part::print);
                        parts.extend(keys.map(|(key, value)| format!("{key}={value}")));
                    )* )?
                    f.write_str(&parts.join(","))
                }
            }

            impl<'de> serde::Deserialize<'de> for $name {
                fn deserialize<D: serde::Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
                    Given::deserialize(deserializer)?.or_default().map_err(serde::de::Error::custom)
                }
            }
        };
    };

    (@default $option:literal, $field:ident, $default:expr) => { $default };
    (@default $option:literal, $field:ident, $default:expr, derived) => { $default };
    (@default $option:literal, $field:ident, $default:expr, required) => {{
        let what = concat!(stringify!($field), " has to be given").to_string();
        return Err(ConfigError::new($option, Problem::Syntax(what)));
    }};
}

pub(crate) use options;
