//! Errors as a runtime reads them: a code and one line.

use std::fmt;
use std::io;

use serde::Serialize;
use vfctl::Error as ChannelError;
use vm_api::channel::RefusalCode;

/// Codes of errors (`CNI 1.1.0, Section 5`), from 100 those of this plugin.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[repr(u32)]
pub enum Code {
    /// The configuration is of a version that the plugin or the command does not have.
    Version = 1,
    /// A key has a value that this plugin cannot do.
    Unsupported = 2,
    /// A variable of the environment is missing or wrong.
    Environment = 4,
    /// Reading, writing or a system call failed.
    Io = 5,
    /// The configuration is not JSON.
    Decode = 6,
    /// A key of the configuration is missing or wrong.
    Config = 7,
    /// The cause ends by itself: another program uses the channel, or another container the VF.
    TryAgain = 11,
    /// ADD cannot work now.
    Unavailable = 50,
    /// The host refuses a setting of the VF.
    Denied = 100,
    /// There is no such VF, or it has no network interface.
    Device = 101,
    /// The guest has no channel to its host, or the host does not answer as expected.
    Channel = 102,
    /// An interface, an address or a route cannot be made.
    Interface = 103,
    /// The IPAM plugin is missing, or its answer is wrong.
    Ipam = 104,
    /// The attachment is not as ADD left it.
    Changed = 105,
}

/// Reason why a command failed.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Error {
    /// Number of the kind; an IPAM plugin's own number is passed on.
    pub code: u32,
    /// Line of text: the key or variable, its value, the cause, and a remedy.
    pub message: String,
    /// More lines, of an IPAM plugin.
    pub details: String,
}

/// A command's result.
pub type Result<T> = std::result::Result<T, Error>;

/// An error on standard output.
#[derive(Serialize)]
struct Printed<'a> {
    #[serde(rename = "cniVersion")]
    version: &'a str,
    code: u32,
    msg: &'a str,
    #[serde(skip_serializing_if = "str::is_empty")]
    details: &'a str,
}

impl Error {
    /// Creates an error.
    pub fn new(code: Code, message: impl Into<String>) -> Self {
        Self { code: code as u32, message: message.into(), details: String::new() }
    }

    /// A failed system call or file access, and what it was for.
    pub fn io(what: impl fmt::Display, error: &io::Error) -> Self {
        Self::new(Code::Io, format!("{what}: {error}"))
    }

    /// True if the error has this code.
    pub fn is(&self, code: Code) -> bool {
        self.code == code as u32
    }

    /// The error as JSON of a version of CNI.
    pub fn to_json(&self, version: &str) -> String {
        let printed = Printed { version, code: self.code, msg: &self.message, details: &self.details };
        serde_json::to_string(&printed).unwrap_or_default()
    }
}

impl fmt::Display for Error {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.message)
    }
}

impl std::error::Error for Error {}

impl From<ChannelError> for Error {
    fn from(error: ChannelError) -> Self {
        let code = match &error {
            ChannelError::Busy(_) | ChannelError::NoAnswer { .. } | ChannelError::Io { .. } => Code::TryAgain,
            ChannelError::Refused(refusal) => match refusal.code {
                RefusalCode::Failed => Code::TryAgain,
                RefusalCode::Missing => Code::Device,
                RefusalCode::Invalid => Code::Channel,
                RefusalCode::Denied | RefusalCode::Conflict => Code::Denied,
            },
            _ => Code::Channel,
        };
        Self::new(code, error.to_string())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_error_is_json_with_its_code_and_the_version() {
        let error = Error::new(Code::Config, "vlan=5000: give 0 to 4094");
        let json: serde_json::Value = serde_json::from_str(&error.to_json("0.4.0")).unwrap();
        let expected = serde_json::json!({"cniVersion": "0.4.0", "code": 7, "msg": "vlan=5000: give 0 to 4094"});
        assert_eq!(json, expected);
    }

    #[test]
    fn a_refusal_of_the_host_has_its_sentence_and_a_code() {
        for (code, expected) in [
            (RefusalCode::Denied, Code::Denied),
            (RefusalCode::Conflict, Code::Denied),
            (RefusalCode::Missing, Code::Device),
            (RefusalCode::Failed, Code::TryAgain),
            (RefusalCode::Invalid, Code::Channel),
        ] {
            let message = "vlan=300: the host allows 100-199".to_string();
            let refusal = vm_api::channel::Refusal { code, message: message.clone() };
            assert_eq!(Error::from(ChannelError::Refused(refusal)), Error::new(expected, message));
        }
        assert!(Error::from(ChannelError::Busy("/dev/vport1p1".into())).is(Code::TryAgain));
        assert!(Error::from(ChannelError::NoChannel { port: "sriov.control" }).is(Code::Channel));
    }
}
