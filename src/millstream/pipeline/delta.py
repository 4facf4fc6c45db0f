"""Delta tables that follow an export's entries: one transaction for each batch, which carries the batch's number.

A batch that a table has already is passed over, so following again changes nothing, wherever the last time ended.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING, Any, Final

from millstream.errors import ConfigurationError
from millstream.pipeline.export_files import RAW_SCHEMA, ExportFile, typed_schema
from millstream.tiers.objects import ObjectStoreSettings

if TYPE_CHECKING:
    from millstream.pipeline.export import Entry

PARTITIONS: Final = ["bucket", "date"]


def follow(output: ObjectStoreSettings, bucket: str, entries: Iterable[Entry]) -> None:
    try:
        import deltalake
    except ImportError:
        raise ConfigurationError(
            "Delta tables need the package deltalake", hint="pip install 'millstream[delta]'"
        ) from None
    for name in ("raw", "typed"):
        uri, options = _place(output, name)
        for entry in entries:
            files = entry.raw if name == "raw" else entry.typed
            if files:
                schema = RAW_SCHEMA if name == "raw" else typed_schema(entry.fields)
                _commit(deltalake, uri, options, bucket, entry.batch, files, schema)


def _commit(
    deltalake: Any,
    uri: str,
    options: dict[str, str],
    bucket: str,
    batch: int,
    files: list[ExportFile],
    schema: Any,
) -> None:
    import pyarrow as arrow

    whole = schema.append(arrow.field("bucket", arrow.string())).append(arrow.field("date", arrow.date32()))
    table = deltalake.DeltaTable.create(
        uri, schema=whole, mode="ignore", partition_by=PARTITIONS, storage_options=options
    )
    application = f"millstream-export-{bucket}"
    if (table.transaction_version(application) or 0) >= batch:
        return
    known = {field.name for field in table.schema().fields}
    added = [field for field in deltalake.Schema.from_arrow(whole).fields if field.name not in known]
    if added:
        table.alter.add_columns(added)
    actions = [
        deltalake.transaction.AddAction(
            path=file.path.partition("/")[2],
            size=file.size,
            partition_values={"bucket": bucket, "date": file.date},
            modification_time=0,
            data_change=True,
            stats=f'{{"numRecords": {file.rows}}}',
        )
        for file in files
    ]
    table.create_write_transaction(
        actions=actions,
        mode="append",
        schema=table.schema(),
        partition_by=PARTITIONS,
        commit_properties=deltalake.CommitProperties(app_transactions=[deltalake.Transaction(application, batch)]),
    )


def _place(output: ObjectStoreSettings, name: str) -> tuple[str, dict[str, str]]:
    """The table's URI, and what the store needs to be reached."""
    if output.backend == "fs":
        return str(output.path / name), {}
    scheme, container = {"s3": ("s3", "bucket"), "gcs": ("gs", "bucket"), "azure": ("az", "container")}[output.backend]
    prefix = "" if str(output.path) == "." else f"{str(output.path).strip('/')}/"
    names = {"region": "aws_region", "endpoint": "aws_endpoint", "access_key_id": "aws_access_key_id"}
    names["secret_access_key"] = "aws_secret_access_key"
    options = {names[key]: value for key, value in output.options.items() if key in names}
    if output.options.get("endpoint", "").startswith("http://"):
        options["aws_allow_http"] = "true"
    return f"{scheme}://{output.options[container]}/{prefix}{name}", options
