//! Files that the program may open in addition to those named by the VM's other options: `--landlock-rules`.

use std::path::PathBuf;

use option_derive::{Options, Schema};
use serde::{Deserialize, Serialize};

use crate::config::value::Value;

/// A file, or a folder with its contents, that the program may use once it is confined.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Options, Schema)]
#[options("--landlock-rules")]
pub struct LandlockConfig {
    /// File, or folder with its contents. It must exist.
    #[option("path=<path>", bare, required)]
    #[schema(min_length = 1)]
    pub path: PathBuf,
    /// Allowed access: read (r), write (w), which includes creating and removing files and sockets in a folder, or both
    /// (rw).
    #[option("access=r|w|rw", required)]
    pub access: LandlockAccess,
}

/// Access to a file or a folder.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize, Schema)]
pub enum LandlockAccess {
    /// Read.
    #[default]
    #[serde(rename = "r")]
    Read,
    /// Write, and create and remove files and sockets in a folder.
    #[serde(rename = "w")]
    Write,
    /// Both.
    #[serde(rename = "rw", alias = "wr")]
    ReadWrite,
}

impl Value for LandlockAccess {
    fn parse(text: &str) -> Result<Self, String> {
        match text {
            "r" => Ok(Self::Read),
            "w" => Ok(Self::Write),
            "rw" | "wr" => Ok(Self::ReadWrite),
            _ => Err("give r, w or rw".to_string()),
        }
    }

    fn print(&self) -> Option<String> {
        Some(match self {
            Self::Read => "r".to_string(),
            Self::Write => "w".to_string(),
            Self::ReadWrite => "rw".to_string(),
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_rule_reads_back_as_it_was_written() {
        for (text, access) in [
            ("path=/a,access=r", LandlockAccess::Read),
            ("path=/a,access=w", LandlockAccess::Write),
            ("path=\"/a,b\",access=rw", LandlockAccess::ReadWrite),
        ] {
            let rule: LandlockConfig = text.parse().unwrap();
            assert_eq!((rule.access, rule.to_string().as_str()), (access, text));
            let json = serde_json::to_value(&rule).unwrap();
            assert_eq!(serde_json::from_value::<LandlockConfig>(json).unwrap(), rule);
        }
        let json = serde_json::json!({"path": "/a", "access": "rw"});
        let rule = LandlockConfig { path: "/a".into(), access: LandlockAccess::ReadWrite };
        assert_eq!(serde_json::to_value(rule).unwrap(), json);
    }

    #[test]
    fn a_rule_without_a_path_or_an_access_is_refused() {
        let said = |text: &str| text.parse::<LandlockConfig>().unwrap_err().to_string();
        assert_eq!(said("path=/a"), "--landlock-rules: access is required; add it");
        assert_eq!(said("access=r"), "--landlock-rules: path is required; add it");
        assert_eq!(said("path=/a,access=x"), "--landlock-rules access=x: give r, w or rw");
    }
}
