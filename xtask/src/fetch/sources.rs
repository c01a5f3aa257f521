//! The mirror that this machine's apt uses. The lab fetches its packages from there, so the code names no host.

use std::fs;
use std::path::Path;

use crate::error::{Context, Error, Result};

/// An archive in the configuration of this machine's apt.
#[derive(Clone, Debug, PartialEq, Eq)]
struct Source {
    uri: String,
    suites: Vec<String>,
    components: Vec<String>,
    signed_by: Option<String>,
}

/// The archives of a Debian machine.
#[derive(Debug, PartialEq, Eq)]
pub(crate) struct Mirrors {
    /// The main archive.
    pub archive: Mirror,
    /// The security archive, if the machine has one.
    pub security: Option<Mirror>,
}

/// The address of an archive, and the keyring for its index.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Mirror {
    uri: String,
    signed_by: Option<String>,
}

impl Mirror {
    /// The line that names `suite` of this archive in a `sources.list`.
    pub(crate) fn line(&self, suite: &str) -> String {
        let options = self.signed_by.as_ref().map(|path| format!("[signed-by={path}] ")).unwrap_or_default();
        format!("deb {options}{} {suite} main\n", self.uri)
    }
}

impl Mirrors {
    /// Reads `/etc/os-release` and `/etc/apt`.
    pub(crate) fn of_this_machine() -> Result<Mirrors> {
        let os_release = fs::read_to_string("/etc/os-release").context("/etc/os-release")?;
        let value = |key: &str| {
            let line = os_release.lines().find_map(|line| line.strip_prefix(key)?.strip_prefix('='));
            line.unwrap_or_default().trim_matches('"').to_owned()
        };
        if value("ID") != "debian" {
            return Err(Error::new(format!(
                "this machine runs {}, but the lab fetches its kernels and tools with Debian's apt; run it on Debian",
                value("PRETTY_NAME")
            )));
        }
        Mirrors::choose(&read_sources(Path::new("/etc/apt")), &value("VERSION_CODENAME"))
    }

    fn choose(sources: &[Source], codename: &str) -> Result<Mirrors> {
        let offering = |suite: &str| {
            let source = sources.iter().find(|s| {
                s.suites.iter().any(|name| name == suite) && s.components.iter().any(|component| component == "main")
            })?;
            Some(Mirror { uri: source.uri.clone(), signed_by: source.signed_by.clone() })
        };
        let archive = offering(codename).ok_or_else(|| {
            Error::new(format!(
                "/etc/apt has no mirror of Debian {codename}, which the lab fetches kernels from; add one"
            ))
        })?;
        Ok(Mirrors { archive, security: offering(&format!("{codename}-security")) })
    }
}

fn read_sources(etc_apt: &Path) -> Vec<Source> {
    let mut files = vec![etc_apt.join("sources.list")];
    if let Ok(entries) = fs::read_dir(etc_apt.join("sources.list.d")) {
        files.extend(entries.flatten().map(|entry| entry.path()));
    }
    files.sort();
    let mut sources = Vec::new();
    for path in files {
        let Ok(text) = fs::read_to_string(&path) else { continue };
        match path.extension().and_then(|e| e.to_str()) {
            Some("list") => sources.extend(text.lines().filter_map(one_line)),
            Some("sources") => sources.extend(text.split("\n\n").filter_map(stanza)),
            _ => {}
        }
    }
    sources
}

/// `deb [options] uri suite component…` (sources.list(5)).
fn one_line(line: &str) -> Option<Source> {
    let rest = line.split('#').next()?.trim().strip_prefix("deb ")?.trim_start();
    let (options, rest) = match rest.strip_prefix('[') {
        Some(rest) => rest.split_once(']')?,
        None => ("", rest),
    };
    let signed_by = options.split_whitespace().find_map(|option| option.strip_prefix("signed-by="));
    let mut words = rest.split_whitespace().map(str::to_owned);
    Some(Source {
        uri: words.next()?,
        suites: vec![words.next()?],
        components: words.collect(),
        signed_by: signed_by.map(str::to_owned),
    })
}

/// Parses a deb822 stanza (sources.list(5)). An embedded key is ignored, and apt's own trusted keys apply.
fn stanza(text: &str) -> Option<Source> {
    let field = |key: &str| {
        let lines = text.lines().filter(|line| !line.starts_with('#'));
        let line = lines.filter_map(|line| line.split_once(':')).find(|(name, _)| name.eq_ignore_ascii_case(key))?;
        Some(line.1.trim().to_owned())
    };
    let words =
        |key: &str| -> Option<Vec<String>> { Some(field(key)?.split_whitespace().map(str::to_owned).collect()) };
    let disabled = field("Enabled").is_some_and(|value| value.eq_ignore_ascii_case("no"));
    if disabled || !words("Types")?.iter().any(|kind| kind == "deb") {
        return None;
    }
    Some(Source {
        uri: words("URIs")?.into_iter().next()?,
        suites: words("Suites")?,
        components: words("Components")?,
        signed_by: field("Signed-By").filter(|value| value.starts_with('/')),
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_mirror_comes_from_a_deb822_file() {
        let etc = tempfile::tempdir().unwrap();
        fs::create_dir(etc.path().join("sources.list.d")).unwrap();
        let text = "Types: deb\n# a comment\nURIs: http://mirror.example/debian\nSuites: bookworm bookworm-updates\n\
                    Components: main\nSigned-By: /usr/share/keyrings/k.gpg\n\nTypes: deb\n\
                    URIs: http://mirror.example/security\nSuites: bookworm-security\nComponents: main\n";
        fs::write(etc.path().join("sources.list.d/debian.sources"), text).unwrap();
        let mirrors = Mirrors::choose(&read_sources(etc.path()), "bookworm").unwrap();
        assert_eq!(
            mirrors.archive.line("trixie"),
            "deb [signed-by=/usr/share/keyrings/k.gpg] http://mirror.example/debian trixie main\n"
        );
        assert_eq!(mirrors.security.unwrap().line("s"), "deb http://mirror.example/security s main\n");
    }

    #[test]
    fn the_mirror_comes_from_a_one_line_file() {
        let etc = tempfile::tempdir().unwrap();
        let text = "# deb http://no.example/debian bookworm main\ndeb-src http://no.example/debian bookworm main\n\
                    deb [arch=amd64 signed-by=/k.gpg] http://yes.example/debian bookworm main contrib # why\n";
        fs::write(etc.path().join("sources.list"), text).unwrap();
        let mirrors = Mirrors::choose(&read_sources(etc.path()), "bookworm").unwrap();
        assert_eq!(
            mirrors.archive.line("bookworm"),
            "deb [signed-by=/k.gpg] http://yes.example/debian bookworm main\n"
        );
        assert_eq!(mirrors.security, None);
    }

    #[test]
    fn a_source_that_is_disabled_or_of_another_release_is_not_taken() {
        let disabled = "Enabled: no\nTypes: deb\nURIs: http://a.example\nSuites: bookworm\nComponents: main";
        assert_eq!(stanza(disabled), None);
        let other = [one_line("deb http://a.example nodistro main").unwrap()];
        assert!(Mirrors::choose(&other, "bookworm").unwrap_err().to_string().contains("bookworm"));
    }
}
