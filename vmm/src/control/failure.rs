//! Errors as replies to clients.

use crate::api::Failure;
use crate::config::ConfigError;
use crate::error::Error;

impl From<ConfigError> for Failure {
    fn from(error: ConfigError) -> Self {
        Error::from(error).into()
    }
}

impl From<Error> for Failure {
    fn from(error: Error) -> Self {
        Self::new(error.kind(), error.to_string())
    }
}

#[cfg(test)]
mod tests;
