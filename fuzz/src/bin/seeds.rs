//! Writes the seeds of all targets into corpora: `seeds <directory>` creates `<directory>/<target>/seed-<n>`.

use std::path::Path;
use std::process::ExitCode;
use std::{env, fs, io};

use fuzz::TARGETS;

fn main() -> ExitCode {
    let Some(corpus) = env::args_os().nth(1) else {
        eprintln!("usage: seeds <directory of the corpora>");
        return ExitCode::FAILURE;
    };
    match write_all(Path::new(&corpus)) {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            eprintln!("{}: cannot write the seeds: {error}", corpus.display());
            ExitCode::FAILURE
        }
    }
}

fn write_all(corpus: &Path) -> io::Result<()> {
    for target in TARGETS {
        let directory = corpus.join(target.name);
        fs::create_dir_all(&directory)?;
        for (n, seed) in (target.seeds)().iter().enumerate() {
            fs::write(directory.join(format!("seed-{n}")), seed)?;
        }
    }
    Ok(())
}
