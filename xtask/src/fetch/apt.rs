//! Debian packages. Tools are installed on this machine with `apt-get install`. The lab's files are unpacked under
//! `target/` by an apt with its own configuration, which needs no root and does not change the machine.

use std::fs;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};

use crate::error::{Context, Error, Result};
use crate::fetch::sources::Mirrors;
use crate::progress::Step;

/// The Debian release whose kernel is 6.1.
pub(crate) const RELEASE_6_1: &str = "bookworm";
/// The Debian release whose kernel is 6.12.
pub(crate) const RELEASE_6_12: &str = "trixie";
/// Debian's release in development, which always has this name.
const DEVELOPMENT: &str = "sid";

/// Prefix of kernels' package names, before their versions.
pub(crate) const KERNEL: &str = "linux-image-";

/// An apt whose configuration, lists and cache are in a folder of the project.
pub(crate) struct Apt {
    folder: PathBuf,
    options: Vec<String>,
    updated: bool,
}

impl Apt {
    /// Prepares the configuration in `folder`. Nothing is fetched yet.
    pub(crate) fn new(folder: &Path) -> Result<Apt> {
        let mirrors = Mirrors::of_this_machine()?;
        let mut list = mirrors.archive.line(RELEASE_6_1) + &mirrors.archive.line(RELEASE_6_12);
        if let Some(security) = mirrors.security {
            list += &security.line(&format!("{RELEASE_6_1}-security"));
        }
        Apt::of(folder, &list)
    }

    /// As [`Self::new`], for the newer release and its backports.
    pub(crate) fn with_backports(folder: &Path) -> Result<Apt> {
        let archive = Mirrors::of_this_machine()?.archive;
        Apt::of(folder, &(archive.line(RELEASE_6_12) + &archive.line(&format!("{RELEASE_6_12}-backports"))))
    }

    /// As [`Self::new`], for the release in development.
    pub(crate) fn with_development(folder: &Path) -> Result<Apt> {
        Apt::of(folder, &Mirrors::of_this_machine()?.archive.line(DEVELOPMENT))
    }

    fn of(folder: &Path, list: &str) -> Result<Apt> {
        for part in ["lists/partial", "cache/archives/partial", "packages"] {
            fs::create_dir_all(folder.join(part)).context(format!("making {}", folder.display()))?;
        }
        let path = |name: &str| folder.join(name).display().to_string();
        fs::write(path("sources.list"), list).context("writing the lab's sources.list")?;
        // This apt only fetches. For it, no package is installed.
        fs::write(path("status"), "").context("writing the lab's package status")?;
        let options = [
            format!("Dir::Etc::sourcelist={}", path("sources.list")),
            "Dir::Etc::sourceparts=-".into(),
            "Dir::Etc::preferences=-".into(),
            "Dir::Etc::preferencesparts=-".into(),
            format!("Dir::State={}", path("")),
            format!("Dir::State::lists={}", path("lists")),
            format!("Dir::State::status={}", path("status")),
            format!("Dir::Cache={}", path("cache")),
            "Dir::Cache::pkgcache=pkgcache.bin".into(),
            "Acquire::Languages=none".into(),
            "Acquire::IndexTargets::deb::DEP-11::DefaultEnabled=false".into(),
            "APT::Architecture=amd64".into(),
            // By default apt fetches as an unprivileged user, who cannot write to this folder.
            "APT::Sandbox::User=root".into(),
        ];
        let options = options.into_iter().flat_map(|option| ["-o".to_owned(), option]).collect();
        Ok(Apt { folder: folder.to_owned(), options, updated: false })
    }

    /// The name and version of the kernel that `meta` depends on, in the version series `series`: the prefix of its
    /// versions ("6.1."), or, after a tilde, a part of them ("~bpo").
    pub(crate) fn resolve(&mut self, meta: &str, series: &str) -> Result<(String, String)> {
        self.update()?;
        let text = output(Command::new("apt-cache").args(&self.options).args(["show", meta]))?;
        for stanza in text.split("\n\n") {
            let field = |key: &str| stanza.lines().find_map(|line| line.strip_prefix(key));
            let (Some(version), Some(depends)) = (field("Version: "), field("Depends: ")) else { continue };
            let fits = if series.starts_with('~') { version.contains(series) } else { version.starts_with(series) };
            let mut names = depends.split(',').filter_map(|depends| depends.split_whitespace().next());
            if let (true, Some(package)) = (fits, names.find(|name| name.starts_with(KERNEL))) {
                return Ok((package.to_owned(), version.to_owned()));
            }
        }
        Err(Error::new(format!("the mirror has no {meta} of version {series}x")))
    }

    /// The newest version of `package` that contains `part`.
    pub(crate) fn version(&mut self, package: &str, part: &str) -> Result<String> {
        self.update()?;
        let text = output(Command::new("apt-cache").args(&self.options).args(["show", package]))?;
        let mut versions = text.lines().filter_map(|line| line.strip_prefix("Version: "));
        let found = versions.find(|version| version.contains(part)).map(str::to_owned);
        found.ok_or_else(|| Error::new(format!("the mirror has no {package} of a version with {part}")))
    }

    /// `packages` of `release` and the libraries they need, as `name=version`. Other dependencies are left out: a
    /// program that is only unpacked does not need them.
    pub(crate) fn with_libraries(&mut self, packages: &[&str], release: &str) -> Result<Vec<String>> {
        self.update()?;
        let mut command = Command::new("apt-get");
        command.args(&self.options).args(["install", "--simulate", "--no-install-recommends", "--target-release"]);
        let plan = output(command.arg(release).args(packages))?;
        let planned = plan.lines().filter_map(|line| line.strip_prefix("Inst ")?.split_once(" ("));
        let wanted = planned.filter(|(name, _)| {
            packages.contains(name) || (name.starts_with("lib") && !name.ends_with("-dev") && !name.contains("-meta-"))
        });
        Ok(wanted.filter_map(|(name, rest)| Some(format!("{name}={}", rest.split(' ').next()?))).collect())
    }

    /// Downloads `packages` (each a name, or `name/release`) and unpacks them into `target`. `what` is the step's name
    /// in the output. Returns the names of the files, which contain the versions, one per line.
    pub(crate) fn unpack(&mut self, what: &str, packages: &[&str], target: &Path) -> Result<String> {
        self.update()?;
        let step = Step::begin("fetch", what);
        let folder = self.folder.join("packages");
        let _ = fs::remove_dir_all(&folder);
        fs::create_dir_all(&folder).context(format!("making {}", folder.display()))?;
        fs::create_dir_all(target).context(format!("making {}", target.display()))?;
        output(Command::new("apt-get").args(&self.options).arg("download").args(packages).current_dir(&folder))?;
        let mut names = String::new();
        let mut size = 0;
        for entry in fs::read_dir(&folder).context("reading the fetched packages")?.flatten() {
            output(Command::new("dpkg-deb").arg("-x").arg(entry.path()).arg(target))?;
            size += entry.metadata().map_or(0, |metadata| metadata.len());
            names += &(entry.file_name().to_string_lossy().replace("%3a", ":") + "\n");
        }
        let _ = fs::remove_dir_all(&folder);
        step.done_with(format!("{what}, {:.1} MB", size as f64 / 1e6));
        Ok(names)
    }

    fn update(&mut self) -> Result<()> {
        if !self.updated {
            let step = Step::begin("fetch", "package lists of Debian");
            output(Command::new("apt-get").args(&self.options).arg("update"))?;
            step.done();
            self.updated = true;
        }
        Ok(())
    }
}

/// Installs each package of `(program, package)` with a program that this machine lacks.
pub(crate) fn install_missing(wanted: &[(&str, &str)]) -> Result<()> {
    let missing: Vec<&str> =
        wanted.iter().filter(|(program, _)| find_program(program).is_none()).map(|(_, package)| *package).collect();
    if missing.is_empty() {
        return Ok(());
    }
    // SAFETY: geteuid has no precondition and cannot fail.
    if unsafe { libc::geteuid() } != 0 {
        return Err(Error::new(format!("packages are missing; run as root: apt-get install {}", missing.join(" "))));
    }
    let step = Step::begin("install", missing.join(" "));
    let environment = ("DEBIAN_FRONTEND", "noninteractive");
    output(Command::new("apt-get").arg("update").env(environment.0, environment.1))?;
    // Another program may hold apt's lock at this moment.
    let arguments = ["install", "--yes", "--no-install-recommends", "--option=DPkg::Lock::Timeout=300"];
    output(Command::new("apt-get").args(arguments).args(&missing).env(environment.0, environment.1))?;
    step.done();
    Ok(())
}

/// The path of a program in `PATH`, or in the folders of root's `PATH`.
pub(crate) fn find_program(name: &str) -> Option<PathBuf> {
    let path = std::env::var_os("PATH").unwrap_or_default();
    let folders = std::env::split_paths(&path).chain(["/usr/sbin", "/sbin"].map(PathBuf::from));
    folders.map(|folder| folder.join(name)).find(|candidate| candidate.is_file())
}

/// Runs a command and returns its output. An error contains the last lines of its error output.
pub(crate) fn output(command: &mut Command) -> Result<String> {
    let name = command.get_program().to_string_lossy().into_owned();
    let finished = command.stdin(Stdio::null()).output().context(format!("running {name}"))?;
    if !finished.status.success() {
        let text = String::from_utf8_lossy(&finished.stderr);
        let lines: Vec<&str> = text.lines().rev().take(5).collect();
        let tail: Vec<&str> = lines.into_iter().rev().collect();
        let arguments: Vec<_> = command.get_args().map(|a| a.to_string_lossy().into_owned()).collect();
        let subject = arguments.last().cloned().unwrap_or_default();
        return Err(Error::new(format!("{name} {subject}: {}: {}", finished.status, tail.join(" / "))));
    }
    Ok(String::from_utf8_lossy(&finished.stdout).into_owned())
}
