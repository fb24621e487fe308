//! Saved states in burnpack, the format of burn's own optimizer records.
//!
//! Tensors are named `PARAMETER.STATE`, where `PARAMETER` is the number of the parameter's id. Step counts are scalars.
//! The first step compares a loaded record with the module, and refuses a record of another optimizer.

use std::collections::BTreeMap;
use std::path::Path;

use burn::tensor::{Bytes, DType, TensorData};
use burn_pack::{Reader, Scalar, Tensor, Writer};

use crate::Error;
use crate::model::Saved;

fn writer(saved: BTreeMap<String, Saved>) -> Writer {
    let (mut tensors, mut scalars) = (Vec::new(), Vec::new());
    for (name, saved) in saved {
        let data = match saved {
            Saved::F32(values) => TensorData::new(values.clone(), [values.len()]),
            Saved::U8(values) => TensorData::new(values.clone(), [values.len()]),
            Saved::Count(count) => {
                scalars.push((name, Scalar::UInt(count)));
                continue;
            }
            Saved::Carried(carried) => {
                scalars.push((name, Scalar::Float(carried)));
                continue;
            }
        };
        let id = name.split('.').next().and_then(|id| id.parse().ok());
        let (bytes, shape, dtype) = data.into_parts();
        tensors.push(Tensor::new(name, dtype, shape, id, bytes));
    }
    scalars.iter().fold(Writer::new(tensors), |writer, (name, value)| writer.with_scalar(name, *value))
}

fn read(reader: Reader) -> Result<BTreeMap<String, Saved>, Error> {
    let mut saved = BTreeMap::new();
    for (name, scalar) in reader.scalars() {
        let one = match scalar {
            Scalar::UInt(count) => Saved::Count(*count),
            Scalar::Float(carried) => Saved::Carried(*carried),
            other => return Err(wrong(name, format!("{other:?}"))),
        };
        saved.insert(name.clone(), one);
    }
    for tensor in reader.into_tensors().map_err(failed)? {
        let (name, dtype, shape, _, bytes) = tensor.into_parts().map_err(failed)?;
        let data = TensorData::from_bytes(bytes, shape, dtype);
        let one = match dtype {
            DType::F32 => data.try_into_vec::<f32>().map(Saved::F32),
            DType::U8 => data.try_into_vec::<u8>().map(Saved::U8),
            _ => return Err(wrong(&name, format!("{dtype:?}"))),
        };
        let one = one.map_err(|error| wrong(&name, format!("{error}")))?;
        saved.insert(name, one);
    }
    Ok(saved)
}

pub(crate) fn into_bytes(saved: BTreeMap<String, Saved>) -> Result<Bytes, Error> {
    writer(saved).into_bytes().map_err(failed)
}

pub(crate) fn from_bytes(bytes: Bytes) -> Result<BTreeMap<String, Saved>, Error> {
    read(Reader::from_bytes(bytes).map_err(failed)?)
}

pub(crate) fn save(saved: BTreeMap<String, Saved>, path: &Path) -> Result<(), Error> {
    writer(saved).overwrite(true).write_to_file(path).map_err(failed)
}

pub(crate) fn load(path: &Path) -> Result<BTreeMap<String, Saved>, Error> {
    read(Reader::from_file(path).map_err(failed)?)
}

fn wrong(name: &str, wrong: String) -> Error {
    Error::State { name: name.to_owned(), wrong }
}

fn failed(error: burn_pack::Error) -> Error {
    Error::Record(Box::new(error))
}
