drawKeptMap(byId("map"), pageData());
