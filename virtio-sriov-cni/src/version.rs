//! Versions of CNI.

use serde_json::json;

use crate::error::{Code, Error, Result};

/// A version that this plugin has.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub enum Version {
    /// 0.3.1: ADD, DEL and VERSION.
    V0_3_1,
    /// 0.4.0: CHECK.
    V0_4_0,
    /// 1.0.0: addresses in results have no version.
    V1_0_0,
    /// 1.1.0: GC and STATUS.
    V1_1_0,
}

/// All of them, in order, with their texts.
const ALL: [(Version, &str); 4] =
    [(Version::V0_3_1, "0.3.1"), (Version::V0_4_0, "0.4.0"), (Version::V1_0_0, "1.0.0"), (Version::V1_1_0, "1.1.0")];

impl Version {
    /// The newest version that this plugin has.
    pub const NEWEST: Self = Self::V1_1_0;

    /// The version of this text. `None` for one that this plugin does not have.
    pub fn parse(text: &str) -> Option<Self> {
        ALL.iter().find(|(_, of)| *of == text).map(|(version, _)| *version)
    }

    /// The version of a configuration's `cniVersion`.
    ///
    /// # Errors
    ///
    /// [`Code::Version`] for one that this plugin does not have.
    pub fn of_config(text: Option<&str>) -> Result<Self> {
        let text = text.unwrap_or("0.1.0");
        let refusal = || Error::new(Code::Version, format!("cniVersion={text}: give one of {}", names().join(", ")));
        Self::parse(text).ok_or_else(refusal)
    }

    /// Text of the version, `1.1.0`.
    pub fn as_str(self) -> &'static str {
        ALL.iter().find(|(version, _)| *version == self).map_or("", |(_, text)| text)
    }

    /// Checks that a command exists in this version.
    ///
    /// # Errors
    ///
    /// [`Code::Version`] otherwise.
    pub fn needs(self, command: &str, since: Self) -> Result<()> {
        let message = || format!("cniVersion={}: {command} needs {} or a later one", self.as_str(), since.as_str());
        if self >= since { Ok(()) } else { Err(Error::new(Code::Version, message())) }
    }
}

fn names() -> Vec<&'static str> {
    ALL.iter().map(|(_, text)| *text).collect()
}

/// The answer to VERSION, with the version of the request.
pub fn supported(asked: &str) -> String {
    json!({"cniVersion": asked, "supportedVersions": names()}).to_string()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn each_version_has_a_text_and_others_are_refused() {
        for (version, text) in ALL {
            assert_eq!(Version::of_config(Some(text)).unwrap().as_str(), text);
            assert_eq!(version.as_str(), text);
        }
        for (wrong, named) in [(None, "0.1.0"), (Some("0.2.0"), "0.2.0"), (Some("1.2.0"), "1.2.0"), (Some(""), "")] {
            let error = Version::of_config(wrong).unwrap_err();
            assert!(error.is(Code::Version), "{error}");
            let expected = format!("cniVersion={named}: give one of 0.3.1, 0.4.0, 1.0.0, 1.1.0");
            assert_eq!(error.message, expected);
        }
    }

    #[test]
    fn a_command_of_a_later_version_is_refused() {
        assert_eq!(Version::V1_1_0.needs("GC", Version::V1_1_0), Ok(()));
        let error = Version::V0_3_1.needs("CHECK", Version::V0_4_0).unwrap_err();
        assert_eq!(error, Error::new(Code::Version, "cniVersion=0.3.1: CHECK needs 0.4.0 or a later one"));
    }
}
