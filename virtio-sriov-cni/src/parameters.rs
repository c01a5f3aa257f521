//! Parameters in the environment: `CNI_COMMAND` and those of the attachment (`CNI 1.1.0, Section 2`).

use std::collections::BTreeMap;
use std::path::PathBuf;

use crate::error::{Code, Error, Result};

/// Longest name of an interface in bytes (`IFNAMSIZ` without its zero).
const LONGEST_NAME: usize = 15;

/// Commands of CNI 1.1.0.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Command {
    /// Gives the container a VF.
    Add,
    /// Takes the VF back.
    Del,
    /// Compares the attachment with the result of ADD.
    Check,
    /// Reports if ADD can work.
    Status,
    /// Takes back the VFs of attachments that are not valid.
    Gc,
    /// Reports versions.
    Version,
}

/// A container's interface in a network.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Attachment {
    /// Container: `CNI_CONTAINERID`.
    pub container: String,
    /// Name of the interface in the container: `CNI_IFNAME`.
    pub interface: String,
    /// File of the container's network namespace: `CNI_NETNS`. Optional for DEL.
    pub netns: Option<PathBuf>,
}

/// The environment of one run.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct Environment(pub BTreeMap<String, String>);

impl Environment {
    /// The variables of this process that are text.
    pub fn of_process() -> Self {
        let text = |(name, value): (std::ffi::OsString, std::ffi::OsString)| {
            Some((name.into_string().ok()?, value.into_string().ok()?))
        };
        Self(std::env::vars_os().filter_map(text).collect())
    }

    fn get(&self, name: &str) -> Option<&str> {
        self.0.get(name).map(String::as_str).filter(|value| !value.is_empty())
    }

    fn required(&self, name: &str) -> Result<&str> {
        self.get(name).ok_or_else(|| Error::new(Code::Environment, format!("{name}: missing; set it")))
    }

    /// The command.
    ///
    /// # Errors
    ///
    /// [`Code::Environment`].
    pub fn command(&self) -> Result<Command> {
        Ok(match self.required("CNI_COMMAND")? {
            "ADD" => Command::Add,
            "DEL" => Command::Del,
            "CHECK" => Command::Check,
            "STATUS" => Command::Status,
            "GC" => Command::Gc,
            "VERSION" => Command::Version,
            other => {
                let message = format!("CNI_COMMAND={other}: give ADD, DEL, CHECK, STATUS, GC or VERSION");
                return Err(Error::new(Code::Environment, message));
            }
        })
    }

    /// The attachment of ADD, CHECK and DEL. DEL alone may be without a namespace.
    ///
    /// # Errors
    ///
    /// [`Code::Environment`].
    pub fn attachment(&self, command: Command) -> Result<Attachment> {
        let container = self.required("CNI_CONTAINERID")?;
        if !is_name(container) {
            let message =
                format!("CNI_CONTAINERID={container:?}: begin with a letter or digit; then also use _, . and -");
            return Err(Error::new(Code::Environment, message));
        }
        let interface = self.required("CNI_IFNAME")?;
        let is_wrong = |c: char| c == '/' || c == ':' || c.is_whitespace();
        if interface.len() > LONGEST_NAME || matches!(interface, "." | "..") || interface.contains(is_wrong) {
            let message = format!("CNI_IFNAME={interface:?}: give up to {LONGEST_NAME} bytes, no /, : or space");
            return Err(Error::new(Code::Environment, message));
        }
        let netns = if command == Command::Del { self.get("CNI_NETNS") } else { Some(self.required("CNI_NETNS")?) };
        Ok(Attachment { container: container.into(), interface: interface.into(), netns: netns.map(PathBuf::from) })
    }

    /// The value of a key in `CNI_ARGS`.
    ///
    /// # Errors
    ///
    /// [`Code::Environment`] if `CNI_ARGS` is not a list of pairs.
    pub fn argument(&self, key: &str) -> Result<Option<&str>> {
        let mut found = None;
        for pair in self.get("CNI_ARGS").unwrap_or_default().split(';').filter(|pair| !pair.is_empty()) {
            match pair.split_once('=') {
                Some((name, value)) if name == key => found = Some(value),
                Some(_) => {}
                None => {
                    let message = format!("CNI_ARGS: {pair:?}: give pairs as in KEY=VALUE;KEY=VALUE");
                    return Err(Error::new(Code::Environment, message));
                }
            }
        }
        Ok(found.filter(|value| !value.is_empty()))
    }

    /// Keys in `CNI_ARGS` that this plugin does not know, for a warning. None if `IgnoreUnknown` is set, or the list is
    /// malformed.
    pub fn unknown_arguments(&self) -> Vec<&str> {
        if matches!(self.argument("IgnoreUnknown"), Ok(Some("1" | "true" | "True" | "TRUE" | "t" | "T")) | Err(_)) {
            return Vec::new();
        }
        let pairs = self.get("CNI_ARGS").unwrap_or_default().split(';').filter_map(|pair| pair.split_once('='));
        pairs.map(|(key, _)| key).filter(|key| !["IgnoreUnknown", "MAC"].contains(key)).collect()
    }

    /// Folders with other plugins.
    ///
    /// # Errors
    ///
    /// [`Code::Environment`] if there are none.
    pub fn plugin_folders(&self) -> Result<Vec<PathBuf>> {
        Ok(self.required("CNI_PATH")?.split(':').filter(|path| !path.is_empty()).map(PathBuf::from).collect())
    }
}

/// True for a name of a container or network: a letter or digit, then these, `_`, `.` and `-`.
pub fn is_name(text: &str) -> bool {
    text.starts_with(|c: char| c.is_ascii_alphanumeric())
        && text.chars().all(|c| c.is_ascii_alphanumeric() || "_.-".contains(c))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn environment(changes: &[(&str, &str)]) -> Environment {
        let usual =
            [("CNI_COMMAND", "ADD"), ("CNI_CONTAINERID", "c1"), ("CNI_IFNAME", "net1"), ("CNI_NETNS", "/run/netns/a")];
        let all = usual.iter().chain(changes).map(|(name, value)| ((*name).to_string(), (*value).to_string()));
        Environment(all.collect())
    }

    #[test]
    fn each_wrong_variable_is_refused_by_name() {
        for (name, value) in [
            ("CNI_COMMAND", ""),
            ("CNI_COMMAND", "add"),
            ("CNI_CONTAINERID", ""),
            ("CNI_CONTAINERID", "../x"),
            ("CNI_CONTAINERID", "-a"),
            ("CNI_CONTAINERID", "a/b"),
            ("CNI_IFNAME", ""),
            ("CNI_IFNAME", "0123456789abcdef"),
            ("CNI_IFNAME", "."),
            ("CNI_IFNAME", ".."),
            ("CNI_IFNAME", "a/b"),
            ("CNI_IFNAME", "a:b"),
            ("CNI_IFNAME", "a b"),
            ("CNI_NETNS", ""),
        ] {
            let environment = environment(&[(name, value)]);
            let error = environment.command().and_then(|command| environment.attachment(command)).unwrap_err();
            assert!(error.is(Code::Environment) && error.message.starts_with(name), "{name}={value}: {error}");
        }
        assert!(environment(&[]).plugin_folders().unwrap_err().message.starts_with("CNI_PATH"));
    }

    #[test]
    fn del_alone_may_be_without_a_namespace() {
        let environment = environment(&[("CNI_NETNS", "")]);
        assert_eq!(environment.attachment(Command::Del).unwrap().netns, None);
        assert!(environment.attachment(Command::Check).is_err());
    }

    #[test]
    fn arguments_are_pairs_with_semicolons() {
        let environment = environment(&[("CNI_ARGS", "IgnoreUnknown=1;MAC=02:00:00:00:00:01;K8S_POD_NAME=a;")]);
        assert_eq!(environment.argument("MAC").unwrap(), Some("02:00:00:00:00:01"));
        assert_eq!(environment.argument("mac").unwrap(), None);
        assert_eq!(environment.unknown_arguments(), [""; 0]);
        let unknown = self::environment(&[("CNI_ARGS", "IgnoreUnknown=0;MAC=02:00:00:00:00:01;IP=10.0.0.5")]);
        assert_eq!(unknown.unknown_arguments(), ["IP"]);
        let wrong = self::environment(&[("CNI_ARGS", "MAC")]);
        assert!(wrong.argument("MAC").unwrap_err().message.starts_with("CNI_ARGS"));
    }
}
