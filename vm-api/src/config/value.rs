//! Values of keys on the command line.

use std::net::IpAddr;
use std::path::PathBuf;

use crate::config::grammar::{list, quote, unquote};
use crate::config::mac::{MacAddress, MacChoice, ParseMacError};

/// Form of a value as an argument of `ch-remote`.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Form {
    /// A text with a grammar of its own.
    Text,
    /// A path.
    Path,
    /// A whole number up to this one.
    Number(i64),
    /// A choice of these words, each with its meaning.
    Words(&'static [(&'static str, &'static str)]),
}

/// The type of a key's value on the command line.
pub(crate) trait Value: Sized {
    /// Form of the value as an argument.
    const FORM: Form = Form::Text;

    /// Parses a value that is not empty: an empty one leaves its key unset.
    ///
    /// # Errors
    ///
    /// Fails with the fault, and an example of a valid value.
    fn parse(text: &str) -> Result<Self, String>;

    /// The value in its parsable form, or `None` if the key is left out.
    fn print(&self) -> Option<String>;
}

impl<T: Value> Value for Option<T> {
    const FORM: Form = T::FORM;

    fn parse(text: &str) -> Result<Self, String> {
        T::parse(text).map(Some)
    }

    fn print(&self) -> Option<String> {
        self.as_ref().and_then(T::print)
    }
}

impl Value for bool {
    const FORM: Form = Form::Words(&[("on", ""), ("off", "")]);

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

/// The text if it has only decimal digits: `parse` of the standard library would accept a sign.
pub(crate) fn digits(text: &str) -> Option<&str> {
    (!text.is_empty() && text.bytes().all(|b| b.is_ascii_digit())).then_some(text)
}

macro_rules! whole_number {
    ($($ty:ty),*) => {$(
        impl Value for $ty {
            const FORM: Form = Form::Number(<$ty>::MAX as i64);

            fn parse(text: &str) -> Result<Self, String> {
                let number = digits(text).and_then(|digits| digits.parse().ok());
                number.ok_or_else(|| format!("give a whole number from 0 to {}", <$ty>::MAX))
            }

            fn print(&self) -> Option<String> {
                Some(self.to_string())
            }
        }
    )*};
}
whole_number!(u8, u16, u32, i32);

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
            .ok_or_else(|| "give a number of bytes, with or without a unit K, M or G, such as 512M".to_string())
    }

    fn print(&self) -> Option<String> {
        Some(bytes(*self))
    }
}

/// A number of bytes with the unit that a user would write: `1536M`.
pub fn bytes(number: u64) -> String {
    match number.trailing_zeros() {
        _ if number == 0 => "0".to_string(),
        0..10 => number.to_string(),
        10..20 => format!("{}K", number >> 10),
        20..30 => format!("{}M", number >> 20),
        _ => format!("{}G", number >> 30),
    }
}

/// A list of numbers, such as `[64,128]`.
impl Value for Vec<u16> {
    fn parse(text: &str) -> Result<Self, String> {
        list(text)?.iter().map(|element| u16::parse(element)).collect()
    }

    fn print(&self) -> Option<String> {
        let numbers: Vec<_> = self.iter().map(u16::to_string).collect();
        (!self.is_empty()).then(|| format!("[{}]", numbers.join(",")))
    }
}

macro_rules! list_of_ranges {
    ($($ty:ty),*) => {$(
        /// A list of numbers and ascending ranges, such as `[3,5-7]`.
        impl Value for Vec<$ty> {
            fn parse(text: &str) -> Result<Self, String> {
                /// Far more than a process can have open, and far less than it has memory for.
                const LONGEST: usize = 65_536;
                let wrong = || "give a list of numbers, such as [3,4] or [3-6]".to_string();
                let number = |text: &str| digits(text).and_then(|digits| digits.parse().ok()).ok_or_else(wrong);
                let mut numbers = Self::new();
                for element in list(text)? {
                    let (first, last): ($ty, $ty) = match element.split_once('-') {
                        Some((first, last)) => (number(first)?, number(last)?),
                        None => (number(&element)?, number(&element)?),
                    };
                    if first > last || (first == last && element.contains('-')) {
                        return Err("a range must be ascending".to_string());
                    }
                    numbers.extend((first..=last).take(LONGEST + 1));
                    if numbers.len() > LONGEST {
                        return Err(format!("the list is longer than {LONGEST} numbers"));
                    }
                }
                Ok(numbers)
            }

            fn print(&self) -> Option<String> {
                let numbers: Vec<_> = self.iter().map(<$ty>::to_string).collect();
                (!self.is_empty()).then(|| format!("[{}]", numbers.join(",")))
            }
        }
    )*};
}
list_of_ranges!(i32, u8, u32);

/// A list of texts, such as `[one,"two, three"]`.
impl Value for Vec<String> {
    fn parse(text: &str) -> Result<Self, String> {
        list(text)
    }

    fn print(&self) -> Option<String> {
        let element = |text: &String| if text.is_empty() { "\"\"".to_string() } else { quote(text) };
        let texts: Vec<_> = self.iter().map(element).collect();
        (!self.is_empty()).then(|| format!("[{}]", texts.join(",")))
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

impl Value for PathBuf {
    const FORM: Form = Form::Path;

    fn parse(text: &str) -> Result<Self, String> {
        Ok(text.into())
    }

    fn print(&self) -> Option<String> {
        Some(quote(&self.to_string_lossy()))
    }
}

impl Value for MacAddress {
    fn parse(text: &str) -> Result<Self, String> {
        text.parse().map_err(|error: ParseMacError| error.to_string())
    }

    fn print(&self) -> Option<String> {
        Some(self.to_string())
    }
}

impl Value for MacChoice {
    fn parse(text: &str) -> Result<Self, String> {
        text.parse().map_err(|error: ParseMacError| error.to_string())
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

/// Bounds of a key whose type has wider ones, and its unit.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Bounds {
    /// The least value, if it is not 0.
    pub minimum: Option<u64>,
    /// The highest value, if it is not the type's.
    pub maximum: Option<u64>,
    /// Form of the value in the help: `<Mbit/s>`.
    pub syntax: &'static str,
}

impl Bounds {
    /// The error of a value that is not a number, with these bounds in place of the type's.
    pub(crate) fn explain(self, error: String) -> String {
        let Some(most) = error.strip_prefix("give a whole number from 0 to ") else { return error };
        format!("give {}", self.number(most))
    }

    /// As [`Self::explain`], of an error of [`typed`](crate::typed); `None` if that is not about a number.
    pub(crate) fn explain_json(self, error: &str) -> Option<String> {
        let (said, most) = error.rsplit_once(", expected a whole number from 0 to ")?;
        Some(format!("{said}, expected {}", self.number(most)))
    }

    /// The values that it may be; `most` is the highest of the type.
    fn number(self, most: &str) -> String {
        let unit = match self.syntax {
            "<Mbit/s>" => " of Mbit/s",
            "<bytes>" => " of bytes",
            "<milliseconds>" => " of milliseconds",
            "<seconds>" => " of seconds",
            _ => "",
        };
        let (minimum, maximum) = (self.minimum.unwrap_or_default(), self.maximum.map(|most| most.to_string()));
        format!("a whole number{unit} from {minimum} to {}", maximum.as_deref().unwrap_or(most))
    }
}

/// Parses a raw value; `None` for an empty one, which leaves its key unset, as Cloud Hypervisor has it.
///
/// # Errors
///
/// Fails with the fault.
pub(crate) fn read<T: Value>(raw: &str) -> Result<Option<T>, String> {
    // A list is split before its quotes are removed.
    let text = if raw.starts_with('[') { raw.to_string() } else { unquote(raw)? };
    if text.is_empty() { Ok(None) } else { T::parse(&text).map(Some) }
}
